"""The compiled kernels, through ctypes, which lets go of the GIL in every call.

    library = load_library()
    with Runner(library, num_threads=1) as runner:
        runner.decoder_step(model, step)

The structs mirror kernels/cpu/api.h; they hold addresses, so whoever fills one keeps the tensors.
DISAGG_CPU_ISA (plain, avx2, avx512, amx) overrides the choice of instruction set.
"""

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from types import TracebackType
from typing import Any

from kernels.cpu.build import build_library

# Outputs of a packed panel; sizes are padded to a multiple of it.
PANEL = 32

# Rows after the last of an activation that a product may read.
MAX_TILE_ROWS = 32

# Best first. amx adds up in another order than avx512, so it is one or the other for all rows.
ISAS = ("amx", "avx512", "avx2", "plain")


class CLinear(Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("in_p", c_int64),
        ("out_p", c_int64),
    )


class CLayer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", CLinear),
        ("qk_norm", c_void_p),
        ("o", CLinear),
        ("mlp_norm", c_void_p),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("window", c_int64),
    )


class CModel(Structure):
    _fields_ = (
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("hidden_p", c_int64),
        ("inner_p", c_int64),
        ("num_q_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("head_dim_p", c_int64),
        ("vocab", c_int64),
        ("vocab_p", c_int64),
        ("embedding", c_void_p),
        ("layers", POINTER(CLayer)),
        ("norm", c_void_p),
        ("head", CLinear),
        ("eps", c_float),
        ("attention_scale", c_float),
    )


class CPool(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("num_layers", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
    )


class CStep(Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("num_draws", c_int64),
        ("token_ids", c_void_p),
        ("rows", c_void_p),
        ("tables", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("pool", CPool),
        ("logits", c_void_p),
        ("best", c_void_p),
    )


class CAttentionOptions(Structure):
    _fields_ = (
        ("scale", c_float),
        ("window", c_int64),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
    )


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "disagg_supports": (c_int, [c_char_p]),
    "disagg_runner_new": (c_void_p, [c_char_p, c_int]),
    "disagg_runner_free": (None, [c_void_p]),
    "disagg_decoder_step": (c_int, [c_void_p, POINTER(CModel), POINTER(CStep)]),
    "disagg_linear": (
        None,
        [c_void_p, POINTER(CLinear), c_int, c_void_p, c_int64, c_void_p],
    ),
    "disagg_attention": (
        c_int,
        [
            *(c_void_p, POINTER(CPool), c_int64, c_void_p, c_int64, c_void_p),
            *(c_void_p, c_int64, c_int64, POINTER(CAttentionOptions), c_void_p),
        ],
    ),
    "disagg_rms_norm": (
        None,
        [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float],
    ),
    "disagg_rotate": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64]),
    "disagg_argmax": (c_int32, [c_void_p, c_void_p, c_int64]),
}

_ERRORS = {-1: "a token id is outside the vocabulary", -2: "a block is outside the pool"}


def load_library() -> ctypes.CDLL:
    """The kernels, compiled if need be. Raises BuildFailed."""
    library = ctypes.CDLL(str(build_library()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def supported_isas(library: ctypes.CDLL) -> list[str]:
    """What this CPU can run, best first."""
    return [isa for isa in ISAS if library.disagg_supports(isa.encode())]


class Runner:
    """Threads with their buffers, on one instruction set. Calls must not overlap."""

    def __init__(
        self, library: ctypes.CDLL, *, num_threads: int = 1, isa: str | None = None
    ) -> None:
        """Raises ValueError for an instruction set that this CPU does not have."""
        self.library = library
        self.isa = isa or os.environ.get("DISAGG_CPU_ISA") or supported_isas(library)[0]
        self.handle = library.disagg_runner_new(self.isa.encode(), num_threads)
        if not self.handle:
            raise ValueError(f"DISAGG_CPU_ISA: this CPU cannot run {self.isa!r}")

    def decoder_step(self, model: CModel, step: CStep) -> None:
        """Raises ValueError for token ids and blocks out of range; nothing is written then."""
        error = self.library.disagg_decoder_step(self.handle, model, step)
        if error:
            raise ValueError(_ERRORS[error])

    def close(self) -> None:
        """Ends the threads and frees the buffers; again is fine."""
        if self.handle:
            self.library.disagg_runner_free(self.handle)
            self.handle = None

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
