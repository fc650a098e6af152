"""Liger's Triton kernels for the elementwise parts of a layer, if the package liger-kernel is installed.

Only the package's autograd functions are used. Its modules would also replace linear layers, which have adapters here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tinsmith.modeling.kernels.elementwise import Elementwise


def liger(ops: Any) -> Elementwise:
    """The backend. `ops`: the module liger_kernel.ops. Raises ImportError if it lacks a function."""
    try:
        norm, glu, rope = ops.LigerRMSNormFunction, ops.LigerSiLUMulFunction, ops.LigerRopeFunction
    except AttributeError as error:
        raise ImportError(f"liger_kernel.ops: {error}") from error

    def rms_norm(x: Tensor, weight_F: Tensor, eps: float, *, gemma: bool) -> Tensor:
        # The last argument: not in place, because another layer may use the incoming gradient too.
        return norm.apply(x, weight_F, eps, float(gemma), "gemma" if gemma else "llama", False)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return glu.apply(gate, up)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope.apply(q, k, cos, sin)

    return Elementwise("liger", rms_norm, swiglu, rotary)
