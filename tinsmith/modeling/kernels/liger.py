"""Liger's Triton kernels for the elementwise parts of a layer, if the package liger-kernel is installed.

Only the package's autograd functions are used. Its modules would also replace linear layers, which have adapters here.
A plain norm is torch's own kernel, which the host starts in a fifth of the time of Liger's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinsmith.modeling.kernels.elementwise import Elementwise


def liger(ops: Any) -> Elementwise:
    """The backend with Liger's kernels. `ops`: the module liger_kernel.ops. Raises ImportError if it lacks a
    function."""
    try:
        norm, glu, rope = ops.LigerRMSNormFunction, ops.LigerSiLUMulFunction, ops.LigerRopeFunction
    except AttributeError as error:
        raise ImportError(f"liger_kernel.ops: {error}") from error

    def rms_norm(x: Tensor, weight_F: Tensor, eps: float, *, gemma: bool) -> Tensor:
        if not gemma:
            return torch.nn.functional.rms_norm(x, weight_F.shape, weight_F, eps)
        # The last argument: not in place, because another layer may use the incoming gradient too.
        return norm.apply(x, weight_F, eps, 1.0, "gemma", False)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return glu.apply(gate, up)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope.apply(q, k, cos, sin)

    return Elementwise("liger", rms_norm, swiglu, rotary)
