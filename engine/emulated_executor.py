"""An executor without a model: steps last what the cost profile says, tokens are a hash.

The KV of a token is its id (K its low 16 bits, V its high ones), and the next token is a hash of
the ids that are read back from the blocks. So a block that did not arrive, or that somebody else
wrote, changes the output, and the right output can be computed by hand: next_token(). There are no
logits: bans are kept to, bias and penalties change nothing, and log-probabilities are made up:
made_up_logprobs().
Runs on the engine thread.
"""

import hashlib
import json
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.cost_model import CostProfile, row_shape, total
from engine.executor import Draw, PromptLogprobs, Row, StepPlan, StepResult, TokenLogprobs
from kvtransfer.layout import KvLayout
from kvtransfer.memory import HostMemory

ARCHITECTURE = "EmulatedForCausalLM"


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


def made_up_logprobs(token_id: int, *, num_logprobs: int, vocab_size: int) -> TokenLogprobs:
    """-1 for the token, which is the likeliest, -2 for the next id, and so on round the ids."""
    return TokenLogprobs(
        chosen=-1.0,
        top=tuple(
            ((token_id + rank) % vocab_size, -1.0 - rank)
            for rank in range(min(num_logprobs, vocab_size))
        ),
    )


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def emulated_layout(*, model: str, block_size: int) -> KvLayout:
    """4 bytes per token: two per K, two per V."""
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
        shape = (memory.num_blocks, 2, memory.layout.block_size)
        self._pool = np.frombuffer(memory.buffer, dtype=np.uint16).reshape(shape)

    def execute(self, plan: StepPlan) -> StepResult:
        started = time.monotonic()
        token_ids = tuple(self._execute(row) for row in plan.rows)
        result = StepResult(
            token_ids=token_ids,
            logprobs=tuple(map(self._logprobs, plan.rows, token_ids)),
            prompt_logprobs=tuple(map(self._prompt_logprobs, plan.rows)),
        )
        shape = total(row_shape(row.start, len(row.token_ids)) for row in plan.rows)
        elapsed_ms = (time.monotonic() - started) * 1e3
        # This is the work: the step's duration is what an emulated node computes.
        time.sleep(max(0.0, self.profile.predict_ms(shape) - elapsed_ms) / 1e3)
        return result

    def _execute(self, row: Row) -> int | None:
        size, end = self.layout.block_size, row.start + len(row.token_ids)
        position = np.arange(row.start, end)
        block, slot = np.array(row.block_table)[position // size], position % size
        token_ids = np.array(row.token_ids, dtype=np.uint32)
        self._pool[block, 0, slot] = token_ids & 0xFFFF
        self._pool[block, 1, slot] = token_ids >> 16
        if row.draw is None:
            return None
        kv = self._pool[np.array(row.block_table)].astype(np.int32)
        read = (kv[:, 0] | kv[:, 1] << 16).reshape(-1)[:end]
        return next_token(read.tobytes(), draw=row.draw, vocab_size=self.vocab_size)

    def _logprobs(self, row: Row, token_id: int | None) -> TokenLogprobs | None:
        if token_id is None or row.draw is None or row.draw.num_logprobs is None:
            return None
        return self._made_up(token_id, row.draw.num_logprobs)

    def _prompt_logprobs(self, row: Row) -> PromptLogprobs | None:
        if row.scoring is None:
            return None
        num_logprobs = row.scoring.num_logprobs
        return PromptLogprobs(
            position=row.start + 1,
            tokens=tuple(self._made_up(token, num_logprobs) for token in row.scoring.token_ids),
        )

    def _made_up(self, token_id: int, num_logprobs: int) -> TokenLogprobs:
        return made_up_logprobs(token_id, num_logprobs=num_logprobs, vocab_size=self.vocab_size)
