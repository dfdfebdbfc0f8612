"""A node's path to a GPU, as far as it goes without one: the device may be a CPU tensor."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import gpu_executor as gpu
from engine.calibration import calibrate
from engine.executor import Draw, Row, StepPlan
from engine.sequence import SamplingParams
from engine.served_model import find_model
from kvtransfer.blocks import BlockPool
from kvtransfer.device_memory import DeviceMemory
from tests.models import make_tiny_model, reference_greedy, reference_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(llama):
    with pytest.raises(ValueError, match=r"--device: cuda:1: torch .* sees no such GPU"):
        find_model(str(llama), dtype="float32", block_size=4, device="cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_node_without_its_gpu_ends_with_one_line(llama):
    command = [sys.executable, "-m", "decode_server", "--model", str(llama), "--device", "cuda"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "sees no such GPU" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_placed_model_calibrates_and_generates_what_transformers_does(llama, monkeypatch):
    monkeypatch.setattr(gpu, "_gpu", lambda device: torch.device("cpu"))
    monkeypatch.setattr(gpu, "free_bytes", lambda device: 1 << 20)
    model = find_model(str(llama), dtype="float32", block_size=4, device="cuda")
    placed = model.place(16)
    assert isinstance(placed.memory, DeviceMemory)
    executor = placed.load(lambda done, in_all: None, 60)
    calibrate(executor, BlockPool(16), max_model_len=60)
    prompt, tokens = [5, 6, 7], []
    for position in range(3, 11):
        start = 0 if not tokens else position - 1
        row = Row(
            token_ids=(prompt + tokens)[start:],
            start=start,
            block_table=tuple(range(15, 12, -1)),
            draw=Draw(sampling=SamplingParams(), seed=0, choice=0, position=position),
        )
        tokens.append(executor.execute(StepPlan(rows=(row,))).token_ids[0])
    assert tokens == reference_greedy(reference_model(llama), prompt, num_tokens=8)
