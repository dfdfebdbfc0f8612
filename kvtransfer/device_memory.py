"""The bytes behind the block pool, on a GPU.

    reading(blocks):  pool --pack--> device staging --copy--> pinned host --> memoryviews
    write(blocks):    bytes --> pinned host --copy--> device staging --unpack--> pool

Host bytes are what the gRPC plane carries. Both run on a stream of their own, beside compute, and
wait for it: a caller has the blocks claimed (sealed to read, writing to write) for as long. Any
thread; each call has a slot of staging to itself.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from kernels.block_copy import pack_blocks, unpack_blocks
from kvtransfer.layout import KvLayout

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Staging for some blocks: flat bytes on the host, pool-shaped on the device."""

    host: torch.Tensor
    device: torch.Tensor


class DeviceMemory:
    """num_blocks blocks and a scratch block behind them, which belongs to padding.

    pool is [num_blocks + 1, *layout.block_shape]. Owner of the pool and of its staging.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, *, device: torch.device) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is below 1")
        self.layout = layout
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks
        self.device = device
        self.pool = torch.zeros(
            (num_blocks + 1, *layout.block_shape), dtype=_DTYPES[layout.dtype], device=device
        )
        self._is_cuda = device.type == "cuda"
        self._stream = _new_stream(device) if self._is_cuda else None
        if self._stream is not None:
            # The zeros are written on the caller's stream.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._lock = threading.Lock()
        self._free: list[_Slot] = []

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[list[memoryview]]:
        """The bytes of each block, a copy, valid within the with block."""
        size = self.layout.block_bytes
        with self._slot(len(block_ids)) as slot:
            with self._on_stream():
                pack_blocks(self.pool, block_K=self._index(block_ids), staging=slot.device)
                self._move(slot.host, slot.device.view(torch.uint8).view(-1), len(block_ids))
            view = slot.host.numpy().data
            yield [view[i * size : (i + 1) * size] for i in range(len(block_ids))]

    def write(self, block_ids: Sequence[int], data: memoryview) -> None:
        """data over the blocks, in order; returns when it is there. data holds so many blocks."""
        size_bytes = len(block_ids) * self.layout.block_bytes
        if data.nbytes != size_bytes:
            raise ValueError(f"data: {data.nbytes} bytes for {size_bytes} bytes of blocks")
        with self._slot(len(block_ids)) as slot:
            slot.host.numpy().data[:size_bytes] = data
            with self._on_stream():
                self._move(slot.device.view(torch.uint8).view(-1), slot.host, len(block_ids))
                unpack_blocks(self.pool, block_K=self._index(block_ids), staging=slot.device)

    def _move(self, target: torch.Tensor, source: torch.Tensor, num_blocks: int) -> None:
        size_bytes = num_blocks * self.layout.block_bytes
        target[:size_bytes].copy_(source[:size_bytes], non_blocking=True)

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64).to(self.device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Our stream, waited for at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    @contextmanager
    def _slot(self, num_blocks: int) -> Iterator[_Slot]:
        """A slot for at least so many blocks; there are as many as calls were open at a time."""
        with self._lock:
            fitting = [slot for slot in self._free if slot.device.shape[0] >= num_blocks]
            if fitting:
                self._free.remove(fitting[0])
            elif self._free:
                # Too small for what is asked now, and so for what will be.
                self._free.pop()
        slot = fitting[0] if fitting else self._allocate(num_blocks)
        try:
            yield slot
        finally:
            with self._lock:
                self._free.append(slot)

    def _allocate(self, num_blocks: int) -> _Slot:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            shape = (num_blocks, *self.layout.block_shape)
            device = torch.empty(shape, dtype=self.pool.dtype, device=self.device)
        size_bytes = num_blocks * self.layout.block_bytes
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return _Slot(host, device)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
