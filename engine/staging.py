"""Small arrays on their way to the device: one pinned buffer, its device twin, one copy.

    numpy arrays --upload--> [ a | b | c ] pinned --copy, not waited for--> [ a | b | c ] --> views

The same shapes in the same order land at the same addresses, which is what a captured step needs.
Runs on the engine thread.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

_ALIGN = 16


class Staging:
    """Owner of both buffers. A step must have ended before the next upload."""

    def __init__(self, device: torch.device, *, size_bytes: int) -> None:
        self._device = device
        self._allocate(size_bytes)

    @property
    def size_bytes(self) -> int:
        return self._host.shape[0]

    def fits(self, arrays: Sequence[Array]) -> bool:
        return _end(arrays) <= self.size_bytes

    def reserve(self, arrays: Sequence[Array]) -> None:
        """Makes room for these; views that were handed out before are no longer filled."""
        if not self.fits(arrays):
            self._allocate(2 * _end(arrays))

    def upload(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Device views of the arrays' contents, valid until the next upload."""
        assert self.fits(arrays)
        views: list[torch.Tensor] = []
        offset = 0
        for array in arrays:
            raw = array.reshape(-1).view(np.uint8)
            end = offset + raw.shape[0]
            self._array[offset:end] = raw
            dtype = torch.from_numpy(array[:0]).dtype
            views.append(self._twin[offset:end].view(dtype))
            offset = _aligned(end)
        self._twin[:offset].copy_(self._host[:offset], non_blocking=True)
        return views

    def rest_of(self, view: torch.Tensor) -> torch.Tensor:
        """From where an uploaded view begins to the end of the buffer."""
        begin = view.storage_offset() * view.itemsize
        return self._twin[begin:].view(view.dtype)

    def _allocate(self, size_bytes: int) -> None:
        size_bytes = _aligned(size_bytes)
        is_cuda = self._device.type == "cuda"
        self._host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._array = self._host.numpy()
        self._twin = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)


def _end(arrays: Sequence[Array]) -> int:
    return sum(_aligned(array.nbytes) for array in arrays)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
