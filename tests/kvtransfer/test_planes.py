"""Which plane two nodes use."""

from dataclasses import replace

import pytest
from test_lane import LAYOUT

from kvtransfer.planes import common_plane, planes_for, planes_on, slot_bytes

CPU = planes_on("cpu", has_nccl=False)
GPU = planes_on("cuda:1", has_nccl=True)
GPU_ALONE = planes_on("cuda", has_nccl=False)
EMULATED = ("grpc",)
HERE, ELSEWHERE = "127.0.0.1:50052", "10.0.0.3:50053"


@pytest.mark.parametrize(
    ("sender", "receiver", "address", "expected"),
    [
        (CPU, CPU, HERE, "gloo"),
        (CPU, CPU, "localhost:1", "gloo"),
        (CPU, CPU, "[::1]:1", "gloo"),
        (CPU, CPU, ELSEWHERE, "grpc"),
        (GPU, GPU, HERE, "nccl"),
        (GPU, GPU, ELSEWHERE, "nccl"),
        (GPU, CPU, HERE, "grpc"),
        (CPU, GPU, HERE, "grpc"),
        (GPU, GPU_ALONE, ELSEWHERE, "grpc"),
        (EMULATED, EMULATED, HERE, "grpc"),
        (("nccl",), CPU, HERE, None),
    ],
)
def test_the_best_plane_that_both_have_and_that_reaches_is_taken(
    sender, receiver, address, expected
):
    offered = planes_for(address, sender)
    assert common_plane(offered, receiver, their_layout=LAYOUT, our_layout=LAYOUT) == expected


@pytest.mark.parametrize("difference", [{"block_size": 32}, {"inner_order": "L2SHD"}])
def test_blocks_that_must_be_translated_do_not_go_over_nccl(difference):
    theirs = replace(LAYOUT, **difference)
    assert common_plane(GPU, GPU, their_layout=theirs, our_layout=LAYOUT) == "grpc"
    assert common_plane(CPU, CPU, their_layout=theirs, our_layout=LAYOUT) == "gloo"


def test_a_slot_holds_whole_blocks():
    # 98,304 bytes a block: 42 in 4 MiB, 170 in 16 MiB.
    assert slot_bytes("grpc", LAYOUT) == 42 * 98304
    assert slot_bytes("nccl", LAYOUT) == 170 * 98304
    large = replace(LAYOUT, num_layers=6000)
    assert slot_bytes("gloo", large) == large.block_bytes
