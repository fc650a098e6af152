"""Liger's Triton kernels for the elementwise parts of a layer, where the package liger-kernel is installed.

Only its autograd functions are taken. Its modules would replace linear layers too, which here carry the adapters.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tinsmith.modeling.kernels.elementwise import Elementwise


def liger(ops: Any) -> Elementwise:
    """`ops` is the module liger_kernel.ops. Raises ImportError when it lacks a function."""
    try:
        norm, glu, rope = ops.LigerRMSNormFunction, ops.LigerSiLUMulFunction, ops.LigerRopeFunction
    except AttributeError as error:
        raise ImportError(f"liger_kernel.ops: {error}") from error

    def rms_norm(x: Tensor, weight_F: Tensor, eps: float, *, gemma: bool) -> Tensor:
        # Not in place: the gradient that comes in may be another layer's too.
        return norm.apply(x, weight_F, eps, float(gemma), "gemma" if gemma else "llama", False)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return glu.apply(gate, up)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope.apply(q, k, cos, sin)

    return Elementwise("liger", rms_norm, swiglu, rotary)
