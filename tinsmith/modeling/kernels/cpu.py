"""The elementwise operations of a layer on a CPU, where a pass through memory costs as much as its arithmetic.

Autograd's own operations save several tensors of the size of x, and pass through them. These functions save x only, and
pass through it as few times as torch's operations allow.

In bfloat16 every operation rounds. There these functions round at the same places as the plain ones (elementwise.py),
so that the results are bit-equal, and gradients are computed by the plain functions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tinsmith.modeling.kernels import elementwise
from tinsmith.modeling.kernels.elementwise import Elementwise


def normalize(x: Tensor, weight_F: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x, [..., F], and the factor of each row, [..., 1], which `normalize_backward` takes as `scale`."""
    if x.dtype == torch.bfloat16:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(weight_F.dtype).mul_(weight_F).to(x.dtype), scale
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_scalar(eps, x.dtype), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight_F), scale


def gemma_factor(weight_F: Tensor) -> Tensor:
    """The factor 1 + weight of Gemma's norms. It is float32 for a weight in bfloat16, so that `normalize` rounds only
    once, after the multiplication."""
    return 1.0 + (weight_F.float() if weight_F.dtype == torch.bfloat16 else weight_F)


def normalize_backward(grad: Tensor, x: Tensor, scale: Tensor, weight_F: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient of x from that of `normalize`'s output. Written to `out` if it is given."""
    # y = w x s with s = (mean(x^2) + eps)^(-1/2), so dx = s w dy - x s^3 mean(x w dy)
    grad = grad * weight_F
    share = torch.linalg.vecdot(grad, x).unsqueeze(-1).mul_(scale.pow(3).div_(-x.shape[-1]))
    return torch.addcmul(grad.mul_(scale), x, share, out=grad if out is None else out)


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """The gradients of gate and up from that of silu(gate) * up. Written to `out` if it is given."""
    if out is None:
        return torch.ops.aten.silu_backward(grad * up, gate), silu(gate).mul_(grad)
    torch.ops.aten.silu_backward(grad * up, gate, grad_input=out[0])
    torch.mul(silu(gate), grad, out=out[1])
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of each head of x [T, N, D] by angles with these cosines and sines, [T, 1, D]."""
    if x.dtype == torch.bfloat16:
        return elementwise.rotate(x, cos, sin)
    first, second = x.chunk(2, -1)
    sin_first, sin_second = sin.chunk(2, -1)
    y = x * cos
    y_first, y_second = y.chunk(2, -1)
    y_first.addcmul_(second, sin_first, value=-1)
    y_second.addcmul_(first, sin_second)
    return y


def rotate_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of x from that of `rotate`'s output."""
    first, second = grad.chunk(2, -1)
    sin_first, sin_second = sin.chunk(2, -1)
    out = grad * cos
    out_first, out_second = out.chunk(2, -1)
    out_first.addcmul_(second, sin_second)
    out_second.addcmul_(first, sin_first, value=-1)
    return out


@cache
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_F: Tensor, eps: float) -> Tensor:
        y, scale = normalize(x, weight_F, eps)
        ctx.save_for_backward(x, scale, weight_F)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return normalize_backward(grad_outputs[0], *ctx.saved_tensors), None, None


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        return swiglu_backward(grad_outputs[0], *ctx.saved_tensors)


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return rotate_backward(grad_outputs[0], *ctx.saved_tensors), None, None


def rms_norm(x: Tensor, weight_F: Tensor, eps: float, *, gemma: bool) -> Tensor:
    if x.dtype == torch.bfloat16:
        return elementwise.rms_norm(x, weight_F, eps, gemma=gemma)
    weight_F = gemma_factor(weight_F) if gemma else weight_F
    if not torch.is_grad_enabled():  # saves the fixed cost of an autograd function, which counts in a decode step
        return normalize(x, weight_F, eps)[0]
    return _RMSNormFunction.apply(x, weight_F, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if torch.is_grad_enabled() and gate.dtype != torch.bfloat16:
        return _SwiGLUFunction.apply(gate, up)
    return silu(gate) * up


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled() or q.dtype == torch.bfloat16:
        return elementwise.rotary(q, k, cos, sin)
    cos, sin = (angles.transpose(0, 1) for angles in (cos, sin))  # [T, 1, D]
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x_1_N_T_D: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _RotaryFunction.apply(x_1_N_T_D.squeeze(0).transpose(0, 1), cos, sin).transpose(0, 1)[None]


CPU = Elementwise("in few passes", rms_norm, swiglu, rotary)
