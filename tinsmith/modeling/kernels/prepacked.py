"""Frozen matrices a second time, in the layout in which a CPU's matrix kernels (oneDNN) work.

A plain product brings its weight into that layout in every call. With the 8 to 64 rows of a decode step this costs as
much as the arithmetic, so such products take half the time here; with one row a plain product is faster, and above 64
rows it is as fast.

For each shape of a product oneDNN keeps what it has compiled: 0.56 MB, and a millisecond the first time. So only 40
numbers of rows are computed here; others get rows that nobody reads.

Shapes: n rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.memory import host_bytes

_TYPICAL_ROWS = 64
"""For which the layout is chosen; it serves every number."""
_MAX_ROWS = 64
_MAX_EXACT_ROWS = 32
_STEP = 4
"""Above _MAX_EXACT_ROWS the number of rows is a multiple of it."""
COMPILED_BYTES = 24_000_000
"""What oneDNN keeps at most for each shape of a matrix: 40 products of 0.56 MB, measured with float32 on AVX2."""
_DTYPES = (torch.float32, torch.bfloat16)
_MAX_SHARE_OF_FREE = 0.25
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


class Prepacked:
    """Matrices that read one input, end to end, so that one product gives the outputs of them all."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, by_columns: bool = True) -> None:
        """weights: [O, I] each. They stay where they are, this is a copy; `by_columns` says that they lie column by
        column, which is the best layout for one row."""
        self._source = weights[0].data_ptr()
        self._min_rows = 1 if weights[0].dtype == torch.bfloat16 or not by_columns else 2
        self._sizes = [weight.shape[0] for weight in weights]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(list(weights)), _TYPICAL_ROWS)
        self._bias = None
        if any(bias is not None for bias in biases):
            filled = (
                weight.new_zeros(weight.shape[0]) if bias is None else bias
                for weight, bias in zip(weights, biases, strict=True)
            )
            self._bias = torch.cat(list(filled))

    def gains(self, x: Tensor) -> bool:
        """Whether this is faster than plain products."""
        return self._min_rows * x.shape[-1] <= x.numel() <= _MAX_ROWS * x.shape[-1]

    def copies(self, weight_O_I: Tensor) -> bool:
        """Whether this is what the (first) matrix holds now: a version of all parameters may have taken its place."""
        return weight_O_I.data_ptr() == self._source

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """[..., O] of each matrix for x [..., I]; views of one tensor. Not differentiable."""
        return self.together(x).split(self._sizes, -1)

    def together(self, x: Tensor) -> Tensor:
        """All outputs, end to end."""
        num_rows = x.numel() // x.shape[-1]
        computed = rows_computed(num_rows)
        if computed == num_rows:
            return self._product(x)
        padded_n_I = x.new_zeros(computed, x.shape[-1])
        padded_n_I[:num_rows] = x.reshape(num_rows, -1)
        return self._product(padded_n_I)[:num_rows].view(*x.shape[:-1], -1)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def rows_computed(num_rows: int) -> int:
    """With how many rows a product of `num_rows` is computed."""
    return num_rows if num_rows <= _MAX_EXACT_ROWS else -(-num_rows // _STEP) * _STEP


def works(dtype: torch.dtype, device: torch.device) -> bool:
    """Tried on random numbers: the operations are torch's own, but not all of its builds have them."""
    if device.type != "cpu" or dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x_n_I, w_O_I = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 48), (96, 48)))
    expected = x_n_I @ w_O_I.T
    try:
        (ours,) = Prepacked([w_O_I], [None])(x_n_I)
    except (AttributeError, RuntimeError):
        return False
    return bool((ours - expected).norm() <= _TOLERANCE[dtype] * expected.norm())


def have_room(num_bytes: int) -> bool:
    """Whether a copy of so many bytes leaves most of the free memory to others."""
    return num_bytes <= _MAX_SHARE_OF_FREE * host_bytes()
