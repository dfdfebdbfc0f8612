"""Matrix product with fixed weights: y = x @ weight^T + bias, the weight packed once at load.

How the weight is kept decides the speed with few rows on a CPU (1 thread, Sapphire Rapids,
576 x 49152, 4 rows: float32 18 ms plain, 8.6 ms packed; bfloat16 8.4 ms plain, 2.7 ms packed):

    float32             [in, out] contiguous and torch.mm; past _WIDE outputs oneDNN's packing
    bfloat16            oneDNN's packing, where the CPU has bfloat16 dot products
    all else            the checkpoint's [out, in] and F.linear

In float32 one row is computed as two, because a matrix-vector product adds up in another order:
on the CPUs measured a row's result then does not depend on how many rows it is batched with.

Suffixes: T rows, I in features, O out features.
"""

import torch
import torch.nn.functional as F

# Outputs past which oneDNN's float32 packing beats torch.mm: in practice, the vocabulary.
_WIDE = 16384

# The batch size that oneDNN packs for; it is a hint, and results are right for any.
_ROWS_HINT = 16


class Linear:
    """One packed weight and its bias. Owner of the packed copy; the one passed in is not kept
    (but for the plain form)."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._bias_O = bias_O
        self._form = _form_for(weight_OI)
        match self._form:
            case "packed":
                self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS_HINT)
            case "transposed":
                self._weight = weight_OI.t().contiguous()
            case _:
                self._weight = weight_OI
        self._min_rows = 2 if weight_OI.dtype == torch.float32 else 1

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """y_TO, a new tensor."""
        num_rows = x_TI.shape[0]
        if num_rows < self._min_rows:
            return self._product(x_TI.expand(self._min_rows, -1).contiguous())[:num_rows]
        return self._product(x_TI)

    def _product(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._form == "packed":
            y_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x_TI, self._weight, self._bias_O, "none", [], ""
            )
            return y_TO
        if self._form == "transposed":
            if self._bias_O is None:
                return torch.mm(x_TI, self._weight)
            return torch.addmm(self._bias_O, x_TI, self._weight)
        return F.linear(x_TI, self._weight, self._bias_O)


def _form_for(weight_OI: torch.Tensor) -> str:
    if weight_OI.device.type != "cpu":
        return "plain"
    if weight_OI.dtype == torch.float32:
        is_wide = weight_OI.shape[0] > _WIDE
        return "packed" if is_wide and _can_pack() else "transposed"
    if weight_OI.dtype == torch.bfloat16 and _can_pack() and _has_bfloat16():
        return "packed"
    return "plain"


def _can_pack() -> bool:
    """The packing ops are what torch.compile emits on x86; other builds may lack them."""
    return torch._C._has_mkldnn and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def _has_bfloat16() -> bool:
    name = "_is_mkldnn_bf16_supported"
    return hasattr(torch.ops.mkldnn, name) and bool(getattr(torch.ops.mkldnn, name)())
