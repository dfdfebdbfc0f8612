"""Bad input: each gets its own status, names what is wrong, and leaves nothing behind."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from coordinator.client import AsyncClient
from coordinator.events import GenerationError
from coordinator.supervisor import Cluster
from tests.e2e.serving import collect, predicted, wait_all_available, wait_until
from tests.models import make_tiny_model

INVALID = grpc.StatusCode.INVALID_ARGUMENT

emulated = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    options = {"kv_memory_gb": 0.001, "max_model_len": 1000}
    async with (
        Cluster(model="emulated", num_prefill=1, num_decode=1, node_options=options) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        yield client


@emulated
@pytest.mark.parametrize(
    ("prompt", "options", "status", "reason", "named"),
    [
        ("", {}, INVALID, "INVALID_ARGUMENT", "text"),
        ([], {}, INVALID, "INVALID_ARGUMENT", "token_ids"),
        ([1] * 1000, {}, INVALID, "CONTEXT_TOO_LONG", "1000"),
        ("a" * 1000, {}, INVALID, "CONTEXT_TOO_LONG", "1000"),
        ([1] * 900, {"max_tokens": 101}, INVALID, "CONTEXT_TOO_LONG", "max_tokens"),
        ("a" * 4_000_000, {}, INVALID, "PROMPT_TOO_LARGE", "32000"),
        ("hi", {"max_tokens": 0}, INVALID, "INVALID_ARGUMENT", "max_tokens"),
        ("hi", {"temperature": -1.0}, INVALID, "INVALID_ARGUMENT", "temperature"),
        ("hi", {"temperature": float("nan")}, INVALID, "INVALID_ARGUMENT", "temperature"),
        ("hi", {"temperature": float("inf")}, INVALID, "INVALID_ARGUMENT", "temperature"),
        ("hi", {"top_p": 2.0}, INVALID, "INVALID_ARGUMENT", "top_p"),
        ("hi", {"top_p": 0.0}, INVALID, "INVALID_ARGUMENT", "top_p"),
        ("hi", {"min_p": -0.5}, INVALID, "INVALID_ARGUMENT", "min_p"),
        ([1, 256], {}, INVALID, "INVALID_ARGUMENT", "token_ids"),
        ([1, 2**32 - 1], {}, INVALID, "INVALID_ARGUMENT", "token_ids"),
        ("hi", {"stop_token_ids": [256]}, INVALID, "INVALID_ARGUMENT", "stop_token_ids"),
        ("hi", {"request_id": "x" * 129}, INVALID, "INVALID_ARGUMENT", "request_id"),
        ("hi", {"request_id": "a\nb"}, INVALID, "INVALID_ARGUMENT", "request_id"),
        ([{"role": "", "content": ""}] * 100_000, {}, INVALID, "INVALID_ARGUMENT", "chat.messages"),
        ([{"role": "x" * 20_000, "content": ""}], {}, INVALID, "INVALID_ARGUMENT", "chat"),
        ([1] * 4_000_000, {}, INVALID, "CONTEXT_TOO_LONG", "1000"),
        ([{"role": "robot", "content": "hi"}], {}, INVALID, "INVALID_ARGUMENT", "chat"),
        ("hi", {"model": "gpt-9"}, grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", "gpt-9"),
    ],
)
async def test_a_bad_request_names_its_fault(client, prompt, options, status, reason, named):
    with pytest.raises(GenerationError) as error:
        await collect(client, prompt, **options)
    assert (error.value.status, error.value.reason) == (status, reason)
    assert named in error.value.message
    await wait_all_available(client)


@emulated
@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("n", {"n": 17}),
        ("priority", {"priority": 101}),
        ("tenant", {"tenant": "a" * 129}),
        ("stop.stop_strings", {"stop_strings": ["end"] * 17}),
        ("stop.stop_strings", {"stop_strings": [""]}),
        ("stop.stop_strings", {"stop_strings": ["é" * 129]}),
        ("sampling.repetition_penalty", {"repetition_penalty": 0.0}),
        ("sampling.presence_penalty", {"presence_penalty": 2.5}),
        ("sampling.frequency_penalty", {"frequency_penalty": float("nan")}),
        ("sampling.logit_bias", {"logit_bias": {256: 1.0}}),
        ("sampling.logit_bias", {"logit_bias": {5: 101.0}}),
    ],
)
async def test_what_is_over_a_limit_is_refused_by_name(client, field, options):
    with pytest.raises(GenerationError) as error:
        await collect(client, "hi", **options)
    assert error.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.metadata["field"] == field


@emulated
async def test_a_deadline_that_passes_is_its_own_error_and_frees_the_blocks(client):
    with pytest.raises(GenerationError) as error:
        await collect(client, "hi", max_tokens=900, timeout_s=0.5)
    assert error.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    await wait_all_available(client)


async def test_nodes_of_another_block_size_are_paired():
    async with (
        Cluster(model="emulated", num_prefill=0, num_decode=1) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        for block_size, num_tokens in ((32, 45), (5, 17)):
            prefill = await cluster.start_node("prefill-0", block_size=block_size)
            await wait_until(client, lambda nodes: [n.state for n in nodes] == ["serving"] * 2)
            # No beginning of another's: what is cached would be computed locally.
            prompt = list(range(block_size, block_size + num_tokens))
            result = await collect(client, prompt, max_tokens=20)
            assert result.finished.served_as == "disaggregated"
            assert result.token_ids == predicted(prompt, 20)
            prefill.kill()
            await prefill.exited
            await wait_until(client, lambda nodes: len(nodes) == 1)


async def test_nodes_of_different_layout_are_not_paired_and_the_field_is_named(tmp_path):
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    async with (
        Cluster(
            model=str(folder), num_prefill=0, num_decode=1, node_options={"dtype": "float32"}
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        await cluster.start_node("prefill-0", dtype="bfloat16")
        await cluster.wait_serving()
        with pytest.raises(GenerationError) as error:
            await collect(client, "hi", max_tokens=2)
    assert error.value.status is grpc.StatusCode.FAILED_PRECONDITION
    assert error.value.reason == "LAYOUT_MISMATCH"
    assert error.value.metadata["field"] == "dtype"


async def test_without_nodes_the_error_says_so():
    async with (
        Cluster(model="emulated", num_prefill=0, num_decode=1) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        cluster.processes["decode-0"].kill()
        await cluster.processes["decode-0"].exited
        await wait_until(client, lambda nodes: not nodes)
        with pytest.raises(GenerationError) as error:
            await collect(client, "hi")
    assert error.value.reason == "NO_NODES"


async def run(program: str, *flags: str) -> tuple[int, str]:
    """Exit status and stderr of a program that cannot start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        program,
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stderr.decode()


def one_line_error(stderr: str) -> str:
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if "cannot start" in line]
    return line


@pytest.mark.parametrize("program", ["coordinator", "prefill_server", "decode_server"])
async def test_a_port_in_use_is_one_line(program: str):
    async with Cluster(model="emulated", num_prefill=0, num_decode=1) as cluster:
        status, stderr = await run(program, "--listen", cluster.address, "--model", "emulated")
    assert status == 1
    assert cluster.address in one_line_error(stderr)


@pytest.mark.parametrize("program", ["coordinator", "decode_server"])
async def test_a_missing_model_is_one_line(program: str, tmp_path: Path):
    status, stderr = await run(program, "--listen", "127.0.0.1:0", "--model", f"{tmp_path}/none")
    assert status == 1
    assert "none" in one_line_error(stderr)


async def test_a_truncated_safetensors_file_is_one_line(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, stderr = await run("decode_server", "--listen", "127.0.0.1:0", "--model", str(folder))
    assert status == 1
    assert "model.safetensors" in one_line_error(stderr)


async def test_bad_flags_exit_with_status_2(tmp_path: Path):
    status, stderr = await run("decode_server", "--block-size", "0")
    assert status == 2
    assert "--block-size" in stderr
    assert "Traceback" not in stderr
