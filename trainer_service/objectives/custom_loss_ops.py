"""The operations that a custom loss may use: its graph is rebuilt from these tables. docs/algorithms.md lists them.

Every operation is a function of tensors and numbers, and the shapes of its arguments determine the size of its result.
So operations are left out that draw random numbers, work in place, take a shape from values (boolean masks as indices,
nonzero), return lists of tensors (split, unbind) or leave torch (item, tolist). kthvalue is left out because its time
on the CPU is quadratic in the worst case.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MASK_AS_INDEX = "a boolean mask as an index makes a shape that depends on values; multiply by it, or use torch.where"
MAX_MULTIPLY_ADDS = 2**30
"""Limit on one matrix product."""
_MAX_EXPONENT = 64

Op = Callable[..., Any]


def _products_bounded(fn: Op) -> Op:
    """Limits a product to vectors and matrices and MAX_MULTIPLY_ADDS: the size of the result does not show its cost."""

    @wraps(fn)
    def product(a: Tensor, b: Tensor) -> Tensor:
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and 1 <= a.ndim <= 2 and 1 <= b.ndim <= 2):
            raise TypeError("takes two tensors of one or two dimensions")
        columns = b.shape[-1] if b.ndim == 2 else 1
        if a.numel() * columns > MAX_MULTIPLY_ADDS:
            raise ValueError(f"{list(a.shape)} times {list(b.shape)} is above {MAX_MULTIPLY_ADDS} multiply-adds")
        return fn(a, b)

    return product


def _arithmetic(fn: Op) -> Op:
    """Limits a Python operator to tensors and numbers: on sequences it would repeat or join them."""

    @wraps(fn)
    def compute(*operands: Any) -> Any:
        for operand in operands:
            if not isinstance(operand, (Tensor, int, float)):
                raise TypeError(f"takes tensors and numbers, not {type(operand).__name__}")
        return fn(*operands)

    return compute


def _power(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and abs(b) > _MAX_EXPONENT:
        raise ValueError(f"integer exponent {b} is outside -{_MAX_EXPONENT}..{_MAX_EXPONENT}")
    return operator.pow(a, b)


def _get_item(container: Any, index: Any) -> Any:
    for part in index if isinstance(index, (tuple, list)) else (index,):
        if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
            raise TypeError(MASK_AS_INDEX)
    if isinstance(container, Tensor):
        return container[index]
    if isinstance(container, tuple) and isinstance(index, (int, slice)):
        return container[index]
    raise TypeError(f"indexes tensors, shapes and results, not {type(container).__name__} by {type(index).__name__}")


def _get_attribute(value: Any, name: Any) -> Any:
    if isinstance(value, Tensor) and name in TENSOR_ATTRIBUTES:
        return getattr(value, name)
    if isinstance(value, tuple) and not isinstance(value, Tensor) and name in RESULT_ATTRIBUTES:
        return getattr(value, name)
    raise TypeError(f"reads {', '.join((*TENSOR_ATTRIBUTES, *RESULT_ATTRIBUTES))}, not {str(name)[:50]!r}")


TENSOR_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "T", "mT")
RESULT_ATTRIBUTES = ("values", "indices")
"""Attributes of the results of torch.max, sort, topk and others that return two tensors."""


def _names(text: str) -> list[str]:
    return text.split()


_BOTH = _names("""
    abs absolute acos add addcdiv addcmul all amax amin any argmax argmin argsort asin atan atan2 bitwise_and
    bitwise_not bitwise_or bitwise_xor broadcast_to ceil clamp clamp_max clamp_min clip clone cos cosh cummax cummin
    cumprod cumsum detach diagonal div divide eq erf erfc exp exp2 expm1 fix flatten flip floor floor_divide fmax
    fmin fmod frac gather ge greater greater_equal gt heaviside hypot index_select isfinite isinf isnan le
    lerp less less_equal log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not
    logical_or logical_xor logit logsumexp lt masked_fill max maximum mean median min minimum moveaxis movedim mul
    multiply nan_to_num nanmean nansum narrow ne neg negative not_equal numel permute positive pow prod ravel
    reciprocal relu remainder repeat_interleave reshape roll round rsqrt scatter_add select sgn sigmoid sign sin
    sinh softmax sort sqrt square squeeze std sub subtract sum swapaxes swapdims t take_along_dim tan tanh tile topk
    transpose tril triu true_divide trunc unflatten unsqueeze var where xlogy
""")
_FUNCTIONS_ONLY = _names("""
    arange cat column_stack concat concatenate full full_like hstack is_floating_point norm ones ones_like stack
    std_mean var_mean vstack zeros zeros_like
""")
_METHODS_ONLY = _names("""
    bfloat16 bool contiguous dim double expand expand_as float half int long ndimension nelement new_full new_ones
    new_zeros norm repeat reshape_as size sum_to_size to type_as view view_as
""")
_FUNCTIONAL = _names("""
    binary_cross_entropy_with_logits cosine_similarity elu gelu hardtanh huber_loss kl_div l1_loss leaky_relu
    log_softmax logsigmoid mse_loss normalize relu relu6 selu sigmoid silu smooth_l1_loss softmax softmin softplus
    softsign tanh tanhshrink
""")
_MATH = _names("""
    acos asin atan atan2 ceil cos cosh degrees erf erfc exp expm1 fabs floor hypot isfinite isinf isnan log log10
    log1p log2 pow radians sin sinh sqrt tan tanh trunc
""")
_OPERATORS = _names("abs add and_ eq floordiv ge gt invert le lt mod mul ne neg or_ pos sub truediv xor")
_PRODUCTS = ("dot", "inner", "matmul", "mm", "mv")
_SPELLED_OTHERWISE: Mapping[str, Op] = {
    "torch._C._nn.gelu": functional.gelu,
    "torch._C._nn.log_sigmoid": functional.logsigmoid,
    "torch._C._nn.softplus": functional.softplus,
    "torch.cosine_similarity": functional.cosine_similarity,
    "torch.functional.norm": torch.norm,
}
"""Other names under which torch.fx records some of these functions."""

METHODS: Mapping[str, Op] = {
    **{name: getattr(Tensor, name) for name in (*_BOTH, *_METHODS_ONLY)},
    **{name: _products_bounded(getattr(Tensor, name)) for name in _PRODUCTS},
}
"""Tensor methods, by name."""

FUNCTIONS: Mapping[str, Op] = {
    **{f"torch.{name}": getattr(torch, name) for name in (*_BOTH, *_FUNCTIONS_ONLY)},
    **{f"torch.{name}": _products_bounded(getattr(torch, name)) for name in _PRODUCTS},
    **{f"torch.nn.functional.{name}": getattr(functional, name) for name in _FUNCTIONAL},
    **{f"math.{name}": getattr(math, name) for name in _MATH},
    **{f"operator.{name}": _arithmetic(getattr(operator, name)) for name in _OPERATORS},
    **_SPELLED_OTHERWISE,
    "operator.pow": _arithmetic(_power),
    "operator.matmul": _products_bounded(operator.matmul),
    "operator.getitem": _get_item,
    "getattr": _get_attribute,
}
"""Functions, by the qualified names that the SDK sends."""

DTYPES = {name: getattr(torch, name) for name in _names("bfloat16 bool float16 float32 float64 int32 int64")}
WORDS = frozenset({"floor", "none", "mean", "sum", "batchmean", "tanh", *TENSOR_ATTRIBUTES, *RESULT_ATTRIBUTES})
"""Allowed text arguments: roundings, reductions, GELU's approximation, and the attributes above."""
FORBIDDEN_KEYWORDS = frozenset(
    {"out", "generator", "requires_grad", "pin_memory", "names", "inplace", "layout", "output_size"}
)
"""Keyword arguments that may only be None or False."""
COMPARISONS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "torch.", "operator.")
    for name in _names("eq ge greater greater_equal gt isfinite isinf isnan le less less_equal lt ne not_equal")
)
"""Targets whose result is always a boolean mask."""
COMBINATIONS = frozenset(
    [f"operator.{name}" for name in _names("and_ invert or_ xor")]
    + [
        f"{prefix}{kind}_{name}"
        for prefix in ("", "torch.")
        for kind in ("bitwise", "logical")
        for name in _names("and not or xor")
    ]
)
"""Targets whose result is a boolean mask when all arguments are boolean masks."""


def named(call: Op, args: Sequence[Any]) -> Mapping[str, Any]:
    """Positional arguments by name, if `call` is a Python function; else none. torch's built-in functions take no
    forbidden argument by position."""
    if not isinstance(call, FunctionType):
        return {}
    return dict(zip(call.__code__.co_varnames[: call.__code__.co_argcount], args, strict=False))
