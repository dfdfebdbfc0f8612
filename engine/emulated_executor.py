"""An executor without a model: steps last what the cost profile says, tokens are a hash.

The KV of a token is its id (4 bytes), and the next token is a hash of the ids that are read back
from the blocks. So a block that did not arrive, or that somebody else wrote, changes the output,
and the right output can be computed by hand: next_token(). Runs on the engine thread.
"""

import hashlib
import json
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from engine.cost_model import CostProfile, row_shape, total
from engine.executor import Draw, Row, StepPlan, StepResult
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory

ARCHITECTURE = "EmulatedForCausalLM"
_TOKEN_BYTES = 4


def next_token(token_bytes: bytes, *, draw: Draw, vocab_size: int) -> int:
    """The hash rule: BLAKE2b-64 over the packed int32 ids before it, keyed by seed and choice when
    it is sampled (temperature above 0); the first id from there that is not banned."""
    key = b""
    if draw.sampling.temperature > 0:
        key = struct.pack("<QI", draw.seed, draw.choice)
    digest = hashlib.blake2b(token_bytes, digest_size=8, key=key).digest()
    token_id = int.from_bytes(digest, "little") % vocab_size
    while token_id in draw.banned_token_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def emulated_layout(*, model: str, block_size: int) -> KvLayout:
    """4 bytes per token: a block is block_size int32 ids."""
    return KvLayout(
        model=model,
        model_digest=hashlib.sha256(ARCHITECTURE.encode()).hexdigest(),
        dtype="bfloat16",
        block_size=block_size,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
    )


def read_profile(folder: Path) -> CostProfile:
    """The "cost_profile" of an emulated model's config.json."""
    config = json.loads((folder / "config.json").read_text())
    return CostProfile(**config["cost_profile"])


class EmulatedExecutor:
    """Implements Executor over memory of an emulated layout."""

    def __init__(self, *, folder: Path, memory: HostMemory) -> None:
        self.profile = read_profile(folder)
        self.layout = memory.layout
        self.vocab_size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
        self.eos_token_ids: frozenset[int] = frozenset()
        self._memory = memory

    def execute(self, plan: StepPlan) -> StepResult:
        started = time.monotonic()
        result = StepResult(token_ids=tuple(self._execute(row) for row in plan.rows))
        shape = total(row_shape(row.start, len(row.token_ids)) for row in plan.rows)
        elapsed_ms = (time.monotonic() - started) * 1e3
        # This is the work: the step's duration is what an emulated node computes.
        time.sleep(max(0.0, self.profile.predict_ms(shape) - elapsed_ms) / 1e3)
        return result

    def _execute(self, row: Row) -> int | None:
        size = self.layout.block_size
        for offset, token_id in enumerate(row.token_ids):
            block, slot = divmod(row.start + offset, size)
            view = self._memory.block(row.block_table[block])
            view[slot * _TOKEN_BYTES : (slot + 1) * _TOKEN_BYTES] = pack_tokens([token_id])
        if row.draw is None:
            return None
        num_bytes = (row.start + len(row.token_ids)) * _TOKEN_BYTES
        kv = b"".join(self._memory.block(index) for index in row.block_table)
        return next_token(kv[:num_bytes], draw=row.draw, vocab_size=self.vocab_size)
