"""The bytes behind the block pool, on a GPU.

    reading(blocks):  pool --pack--> device staging --copy--> pinned host --> memoryviews
    write(blocks):    bytes --> pinned host --copy--> device staging --unpack--> pool
    pack(blocks):     pool --pack--> a new tensor, for NCCL to send
    write(blocks):    a tensor that NCCL has filled --unpack--> pool

Host bytes are what the gRPC plane carries. All run on a stream of their own, beside compute, and
all but pack wait for it: a caller has the blocks claimed (sealed to read, writing to write) for as
long. Sealed blocks are complete on the device, because the step that wrote them was waited for.
Any thread; each call has a slot of staging to itself.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

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
        # The one that touches this device's NCCL communicators. Starts when it is first used.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="nccl")

    @contextmanager
    def reading(self, block_ids: Sequence[int]) -> Iterator[list[memoryview]]:
        """The bytes of each block, a copy, valid within the with block."""
        size = self.layout.block_bytes
        with self._slot(len(block_ids)) as slot:
            with self._waited_stream():
                pack_blocks(self.pool, block_K=self._index(block_ids), staging=slot.device)
                self._move(slot.host, slot.device.view(torch.uint8).view(-1), len(block_ids))
            view = slot.host.numpy().data
            yield [view[i * size : (i + 1) * size] for i in range(len(block_ids))]

    def pack(self, block_ids: Sequence[int], *, num_tokens_in_last: int) -> torch.Tensor:
        """The blocks' bytes in new device memory, with zeros behind the last token. Queued, not
        waited for: it is there for what is queued on_stream() after it."""
        with self.on_stream():
            shape = (len(block_ids), *self.layout.block_shape)
            packed = torch.empty(shape, dtype=self.pool.dtype, device=self.device)
            pack_blocks(self.pool, block_K=self._index(block_ids), staging=packed)
            packed[-1, :, :, :, num_tokens_in_last:] = 0
            return packed.view(-1).view(torch.uint8)

    def new_slots(self, num_slots: int, *, slot_bytes: int) -> list[torch.Tensor]:
        """Staging for whole blocks, as bytes on the device."""
        with self.on_stream():
            return [
                torch.empty(slot_bytes, dtype=torch.uint8, device=self.device)
                for _ in range(num_slots)
            ]

    def write(self, block_ids: Sequence[int], data: memoryview | torch.Tensor) -> None:
        """data over the blocks, in order; returns when it is there. data holds so many blocks, on
        the host or, as a tensor of bytes, on this device."""
        size_bytes = len(block_ids) * self.layout.block_bytes
        if data.nbytes != size_bytes:
            raise ValueError(f"data: {data.nbytes} bytes for {size_bytes} bytes of blocks")
        if isinstance(data, torch.Tensor):
            staging = data.view(self.pool.dtype).view(len(block_ids), *self.layout.block_shape)
            with self._waited_stream():
                unpack_blocks(self.pool, block_K=self._index(block_ids), staging=staging)
            return
        with self._slot(len(block_ids)) as slot:
            slot.host.numpy().data[:size_bytes] = data
            with self._waited_stream():
                self._move(slot.device.view(torch.uint8).view(-1), slot.host, len(block_ids))
                unpack_blocks(self.pool, block_K=self._index(block_ids), staging=slot.device)

    def _move(self, target: torch.Tensor, source: torch.Tensor, num_blocks: int) -> None:
        size_bytes = num_blocks * self.layout.block_bytes
        target[:size_bytes].copy_(source[:size_bytes], non_blocking=True)

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64).to(self.device)

    def on_stream(self) -> AbstractContextManager[Any]:
        """What is queued within goes to our stream, in order."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def _waited_stream(self) -> Iterator[None]:
        """Our stream, waited for at the end."""
        with self.on_stream():
            yield
        if self._stream is not None:
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
        with self.on_stream():
            shape = (num_blocks, *self.layout.block_shape)
            device = torch.empty(shape, dtype=self.pool.dtype, device=self.device)
        size_bytes = num_blocks * self.layout.block_bytes
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return _Slot(host, device)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
