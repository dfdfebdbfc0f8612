"""The CUDA step loop on CPU tensors: everything but the capture and the kernels themselves."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cuda_executor import CudaExecutor
from engine.decode_graphs import bucket_for
from engine.executor import Draw, Row, StepPlan
from engine.model import load_model
from engine.model_config import kv_layout
from engine.sequence import SamplingParams
from engine.staging import Staging
from engine.step_arrays import decode_arrays, is_decode, step_arrays
from engine.torch_executor import TorchExecutor
from kvtransfer.device_memory import DeviceMemory
from kvtransfer.memory import HostMemory
from tests.models import VOCAB_SIZE, make_tiny_model, reference_greedy, reference_model

CPU = torch.device("cpu")
NUM_BLOCKS = 96
VARIANTS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mistral with a window": ("mistral", {"sliding_window": 7}),
}


@pytest.fixture(params=VARIANTS, scope="module")
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = VARIANTS[request.param]
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture, **overrides)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def make_executor(folder: Path, *, block_size: int = 5) -> CudaExecutor:
    """Over a pool full of NaN, the scratch block too."""
    model = load_model(folder, dtype="float32")
    layout = kv_layout(
        model.config, model_name="m", digest="d", dtype="float32", block_size=block_size
    )
    memory = DeviceMemory(layout, NUM_BLOCKS, device=CPU)
    memory.pool.fill_(float("nan"))
    return CudaExecutor(model=model, memory=memory, max_model_len=100, buckets=(1, 2, 5))


def draw(position: int, sampling: SamplingParams | None = None, **fields: object) -> Draw:
    sampling = sampling or SamplingParams()
    return Draw(sampling=sampling, seed=3, choice=0, position=position, **fields)  # type: ignore[arg-type]


def generate(executor: CudaExecutor | TorchExecutor, want: int, **draws: object) -> list[list[int]]:
    """Seven prompts, chunked, decoded together: more than the largest bucket, then fewer."""
    rng = random.Random(0)
    lengths = [1, 4, 5, 6, 11, 23, 30]
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    block_size = executor.layout.block_size
    sequences = [rng.choices(range(VOCAB_SIZE), k=length) for length in lengths]
    wants = [length + want + index for index, length in enumerate(lengths)]
    tables = [[free.pop() for _ in range(-(-end // block_size))] for end in wants]
    done = [0] * len(lengths)
    while any(len(tokens) < end for tokens, end in zip(sequences, wants, strict=True)):
        rows, owners = [], []
        for index, tokens in enumerate(sequences):
            if len(tokens) >= wants[index]:
                continue
            start = done[index]
            done[index] = min(len(tokens), start + 7)
            ends = done[index] == len(tokens)
            rows.append(
                Row(
                    token_ids=tokens[start : done[index]],
                    start=start,
                    block_table=tables[index],
                    draw=draw(done[index], **draws) if ends else None,
                )
            )
            owners.append(index)
        result = executor.execute(StepPlan(rows=tuple(rows)))
        for index, token_id in zip(owners, result.token_ids, strict=True):
            if token_id is not None:
                sequences[index].append(token_id)
    return [tokens[length:] for tokens, length in zip(sequences, lengths, strict=True)]


def make_reference(folder: Path) -> TorchExecutor:
    model = load_model(folder, dtype="float32")
    layout = kv_layout(model.config, model_name="m", digest="d", dtype="float32", block_size=5)
    return TorchExecutor(model=model, memory=HostMemory(layout, NUM_BLOCKS))


def test_tokens_are_those_of_transformers(variant: Path) -> None:
    rng = random.Random(5)
    prompt = rng.choices(range(VOCAB_SIZE), k=23)
    expected = reference_greedy(reference_model(variant), prompt, num_tokens=12)
    executor = make_executor(variant)
    tokens, start, table = list(prompt), 0, rng.sample(range(NUM_BLOCKS), 8)
    for chunk in itertools.chain((9, 14), itertools.repeat(1)):
        end = start + chunk
        last = draw(end) if end == len(tokens) else None
        row = Row(token_ids=tokens[start:end], start=start, block_table=table, draw=last)
        (token_id,) = executor.execute(StepPlan(rows=(row,))).token_ids
        start = end
        tokens += [] if token_id is None else [token_id]
        if len(tokens) == len(prompt) + 12:
            break
    assert tokens[len(prompt) :] == expected


def test_mixed_and_padded_steps_give_the_tokens_of_the_torch_executor(variant: Path) -> None:
    assert generate(make_executor(variant), 6) == generate(make_reference(variant), 6)


def test_sampled_and_banned_draws_are_those_of_the_torch_executor(llama: Path) -> None:
    for sampling in (SamplingParams(temperature=0.8, top_k=20, top_p=0.9), SamplingParams()):
        fields = {"sampling": sampling, "banned_token_ids": frozenset(range(0, VOCAB_SIZE, 3))}
        ours = generate(make_executor(llama), 5, **fields)
        assert ours == generate(make_reference(llama), 5, **fields)
        assert all(token % 3 for tokens in ours for token in tokens)


def test_padding_writes_into_the_scratch_block_alone(llama: Path) -> None:
    executor = make_executor(llama)
    pool = executor._memory.pool
    rows = tuple(
        Row(token_ids=(index,), start=0, block_table=(index,), draw=draw(1)) for index in range(3)
    )
    executor.execute(StepPlan(rows=rows))
    is_written = ~pool.isnan().flatten(1).all(dim=1)
    assert is_written.nonzero().flatten().tolist() == [0, 1, 2, NUM_BLOCKS]


def test_logits_without_a_maximum_are_an_error(llama: Path) -> None:
    executor = make_executor(llama)
    # Position 0 of block 4 was never written: attention reads NaN.
    row = Row(token_ids=(1,), start=1, block_table=(4,), draw=draw(2))
    with pytest.raises(ValueError, match="logits of row 0: no finite maximum"):
        executor.execute(StepPlan(rows=(row,)))


def test_a_table_too_long_for_the_static_buffer_is_computed_all_the_same(llama: Path) -> None:
    executor = make_executor(llama)
    executor._decode._staging = Staging(CPU, size_bytes=16)
    assert generate(executor, 4) == generate(make_reference(llama), 4)


@pytest.mark.parametrize(
    ("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 9), (9, 9), (10, None)]
)
def test_the_smallest_bucket_that_holds_the_rows_is_chosen(
    num_rows: int, bucket: int | None
) -> None:
    assert bucket_for(num_rows, (1, 2, 4, 9)) == bucket


def test_step_arrays_by_hand() -> None:
    rows = (
        Row(token_ids=(7, 8, 9), start=2, block_table=(5, 3, 99), draw=draw(5)),
        Row(token_ids=(4,), start=6, block_table=(1, 2), draw=None),
        Row(token_ids=(6,), start=0, block_table=(0,), draw=draw(1)),
    )
    arrays = step_arrays(rows, block_size=4)
    assert not is_decode(rows)
    assert arrays.token_ids_T.tolist() == [7, 8, 9, 4, 6]
    assert arrays.positions_T.tolist() == [2, 3, 4, 6, 0]
    assert arrays.block_T.tolist() == [5, 5, 3, 2, 0]
    assert arrays.slot_T.tolist() == [2, 3, 0, 2, 0]
    assert arrays.last_B.tolist() == [2, 4]
    # Rows of one query first.
    assert arrays.first_token_R.tolist() == [3, 4, 0]
    assert arrays.num_tokens_R.tolist() == [1, 1, 3]
    assert arrays.context_R.tolist() == [7, 1, 5]
    assert arrays.table_start_R.tolist() == [2, 4, 0]
    assert arrays.blocks.tolist() == [5, 3, 1, 2, 0]
    assert (arrays.num_decode, arrays.max_chunk) == (2, 3)


def test_decode_arrays_are_padded_to_the_bucket() -> None:
    rows = (Row(token_ids=(7,), start=4, block_table=(5, 3), draw=draw(5)),)
    assert is_decode(rows)
    arrays = decode_arrays(rows, block_size=4, bucket=3, scratch_block=88)
    assert arrays.token_ids_T.tolist() == [7, 0, 0]
    assert arrays.block_T.tolist() == [3, 88, 88]
    assert arrays.slot_T.tolist() == [0, 0, 0]
    assert arrays.context_R.tolist() == [5, 0, 0]
    assert arrays.num_tokens_R.tolist() == [1, 1, 1]
    assert arrays.first_token_R.tolist() == arrays.last_B.tolist() == [0, 1, 2]
    assert arrays.blocks.tolist() == [5, 3]
    assert (arrays.num_decode, arrays.max_chunk) == (3, 1)


def test_uploads_of_the_same_shapes_land_at_the_same_addresses() -> None:
    staging = Staging(CPU, size_bytes=256)
    first = staging.upload([np.array([1, 2, 3], np.int32), np.array([0.5], np.float64)])
    addresses = [view.data_ptr() for view in first]
    second = staging.upload([np.array([4, 5, 6], np.int32), np.array([1.5], np.float64)])
    assert [view.data_ptr() for view in second] == addresses
    assert first[0].tolist() == [4, 5, 6]
    assert first[1].tolist() == [1.5]
    assert staging.rest_of(second[1]).shape == ((256 - 16) // 8,)


def test_staging_grows_on_request() -> None:
    staging = Staging(CPU, size_bytes=16)
    arrays = [np.arange(100, dtype=np.int32)]
    assert not staging.fits(arrays)
    staging.reserve(arrays)
    assert staging.upload(arrays)[0].tolist() == list(range(100))
