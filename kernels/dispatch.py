"""Which implementation of an op a tensor gets: the one place where that is decided.

    kernels/<op>.py   public function: on_gpu(x) -> kernels/triton/<op>.py, else torch, here

The CPU's C++ path is not chosen here: it replaces a whole step, not an op.
"""

import torch


def on_gpu(x: torch.Tensor) -> bool:
    """Whether x's op runs in Triton."""
    return x.device.type == "cuda"
