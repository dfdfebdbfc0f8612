"""Device memory through host staging, on a CPU device: the same bytes as host memory's."""

import os
import threading

import pytest
import torch

from kvtransfer.device_memory import DeviceMemory
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory, KvMemory

LAYOUT = KvLayout(
    model="m",
    model_digest="d",
    dtype="bfloat16",
    block_size=3,
    num_layers=2,
    num_kv_heads=2,
    head_dim=10,
)


def make_memory() -> DeviceMemory:
    return DeviceMemory(LAYOUT, 8, device=torch.device("cpu"))


@pytest.mark.parametrize("memory", [make_memory(), HostMemory(LAYOUT, 8)], ids=type)
def test_what_is_written_is_read_block_by_block(memory: KvMemory) -> None:
    data = os.urandom(3 * LAYOUT.block_bytes)
    memory.write([5, 0, 7], memoryview(data))
    size = LAYOUT.block_bytes
    with memory.reading([7, 5]) as blocks:
        assert [bytes(block) for block in blocks] == [data[2 * size :], data[:size]]
    with memory.reading([1, 2, 3, 4, 6]) as blocks:
        assert not any(any(block) for block in blocks)


def test_bytes_are_those_of_the_pool_tensor() -> None:
    memory = make_memory()
    memory.pool[4] = torch.randn(LAYOUT.block_shape)
    with memory.reading([4]) as (block,):
        values = torch.frombuffer(bytearray(block), dtype=torch.bfloat16)
    assert torch.equal(values.view(LAYOUT.block_shape), memory.pool[4])


def test_open_reads_have_staging_of_their_own() -> None:
    memory = make_memory()
    memory.write([1], memoryview(b"\1" * LAYOUT.block_bytes))
    memory.write([2], memoryview(b"\2" * LAYOUT.block_bytes))
    with memory.reading([1]) as (first,), memory.reading([2]) as (second,):
        other = threading.Thread(target=memory.write, args=([1], memoryview(bytes(second))))
        other.start()
        other.join(timeout=10)
        assert (first[0], second[0]) == (1, 2)
    with memory.reading([1]) as (first,):
        assert first[0] == 2


@pytest.mark.parametrize("memory", [make_memory(), HostMemory(LAYOUT, 8)], ids=type)
def test_data_of_another_size_is_refused(memory: KvMemory) -> None:
    with pytest.raises(ValueError, match="data: 5 bytes for"):
        memory.write([0], memoryview(b"12345"))
