"""What can be known of NCCL without a GPU: its environment, and that there is none here."""

import os

import pytest
import torch.distributed as dist

from kvtransfer import nccl_group


def test_torch_is_told_not_to_end_the_process_before_the_first_group(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    nccl_group.prepare_environment()
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"
    # A call that does not return holds up the device's lanes, and an abort behind it, until then.
    assert int(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) < nccl_group.ABORT_BUDGET_S


def test_what_an_operator_has_set_stays(monkeypatch):
    monkeypatch.setattr(os, "environ", {"TORCH_FR_BUFFER_SIZE": "100"})
    nccl_group.prepare_environment()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "100"
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_offers_no_such_plane():
    assert nccl_group.nccl_version() is None
    assert not nccl_group.has_nccl()


@pytest.mark.parametrize(
    ("version", "expected"), [((2, 26, 5), False), ((2, 27, 0), True), ((3, 0, 0), True)]
)
def test_an_nccl_that_hangs_in_non_blocking_mode_is_not_used(version, expected, monkeypatch):
    monkeypatch.setattr(nccl_group, "nccl_version", lambda: version)
    assert nccl_group.has_nccl() == expected
