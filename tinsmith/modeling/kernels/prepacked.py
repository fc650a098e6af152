"""A second copy of frozen matrices, in the layout in which a CPU's matrix kernels (oneDNN) work.

A plain product converts its weight to that layout in every call. With the 8 to 64 rows of a decode step, this costs as
much as the arithmetic, so products with the copy take half the time. With one row a plain product is faster, and with
more than 64 rows it is as fast.

oneDNN compiles a kernel for each shape of a product, which takes a millisecond and 0.56 MB, and keeps it. Therefore
products are computed with only 40 different numbers of rows; other numbers are padded with zeros.

Shapes: n rows, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.memory import host_bytes

_TYPICAL_ROWS = 64
"""Number of rows for which oneDNN chooses the layout. A product may have any number of rows."""
_MAX_ROWS = 64
_MAX_EXACT_ROWS = 32
_STEP = 4
"""Above _MAX_EXACT_ROWS, numbers of rows are padded to a multiple of this."""
COMPILED_BYTES = 24_000_000
"""Most bytes of compiled kernels for each shape of a matrix: 40 kernels of 0.56 MB, measured in float32 on AVX2."""
_DTYPES = (torch.float32, torch.bfloat16)
_MAX_SHARE_OF_FREE = 0.25
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


class Prepacked:
    """Copy of matrices that read one input, end to end, so that one product computes the outputs of all."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, by_columns: bool = True) -> None:
        """`weights`: matrices [O, I], which are copied. `by_columns`: whether they lie column by column in memory, in
        which case a plain product with one row is faster than the copy."""
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

    @property
    def memory(self) -> tuple[int, int]:
        """Address and size of the matrices, in bytes."""
        return torch.ops.mkldnn.data_ptr(self._weight), torch.ops.mkldnn._nbytes(self._weight)

    def gains(self, x: Tensor) -> bool:
        """Whether the copy is faster than plain products for this x."""
        return self._min_rows * x.shape[-1] <= x.numel() <= _MAX_ROWS * x.shape[-1]

    def copies(self, weight_O_I: Tensor) -> bool:
        """Whether `weight_O_I` is the first matrix that was copied. It is another one after a full version has replaced
        the parameters."""
        return weight_O_I.data_ptr() == self._source

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """The output [..., O] of each matrix for x [..., I], as views of one tensor. Not differentiable."""
        return self.together(x).split(self._sizes, -1)

    def together(self, x: Tensor) -> Tensor:
        """The outputs of all matrices for x [..., I], end to end in the last dimension. Not differentiable."""
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
    """Number of rows, with padding, with which a product of `num_rows` is computed."""
    return num_rows if num_rows <= _MAX_EXACT_ROWS else -(-num_rows // _STEP) * _STEP


def works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether prepacked products work here, tried on random numbers. Not all builds of torch have these operators."""
    if device.type != "cpu" or dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x_n_I, w_O_I = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 48), (96, 48)))
    expected = x_n_I @ w_O_I.T
    try:
        copy = Prepacked([w_O_I], [None])
        (ours,), _ = copy(x_n_I), copy.memory
    except (AttributeError, RuntimeError):
        return False
    return bool((ours - expected).norm() <= _TOLERANCE[dtype] * expected.norm())


def fits_in_memory(num_bytes: int) -> bool:
    """Whether a copy of `num_bytes` would take at most a quarter of the free memory."""
    return num_bytes <= _MAX_SHARE_OF_FREE * host_bytes()
