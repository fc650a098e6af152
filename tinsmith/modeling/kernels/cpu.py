"""The elementwise parts of a layer on a CPU, where each pass through memory costs as much as its arithmetic.

Autograd's own operations save and pass several tensors of the size of x; these functions save x alone and go over it as
few times as torch's operations allow. float32 and float64 only: in half precision every operation would round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tinsmith.modeling.kernels import elementwise
from tinsmith.modeling.kernels.elementwise import Elementwise


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_F: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight_F)
        return (x * scale).mul_(weight_F)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight_F = ctx.saved_tensors
        # y = w x s with s = (mean(x^2) + eps)^(-1/2), so dx = s w dy - x s^3 mean(x w dy)
        grad = grad_outputs[0] * weight_F
        share = torch.linalg.vecdot(grad, x).unsqueeze(-1).mul_(scale.pow(3).div_(-x.shape[-1]))
        return grad.mul_(scale).addcmul_(x, share), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad_outputs[0] * up, gate)
        return grad_gate, silu(gate).mul_(grad_outputs[0])


class _Rotary(torch.autograd.Function):
    """x [T, N, D]; cos and sin [T, 1, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        y = x * cos
        y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        y[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        (grad,) = grad_outputs
        half = grad.shape[-1] // 2
        out = grad * cos
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out, None, None


def rms_norm(x: Tensor, weight_F: Tensor, eps: float, *, gemma: bool) -> Tensor:
    weight_F = 1.0 + weight_F if gemma else weight_F
    if not torch.is_grad_enabled():  # fixed costs are what counts in a decode step, here and below
        return torch.rms_norm(x, weight_F.shape, weight_F, eps)
    return _RMSNorm.apply(x, weight_F, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _SwiGLU.apply(gate, up) if torch.is_grad_enabled() else silu(gate) * up


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled():
        return elementwise.rotary(q, k, cos, sin)
    cos, sin = (angles.transpose(0, 1) for angles in (cos, sin))  # [T, 1, D]
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x_1_N_T_D: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Rotary.apply(x_1_N_T_D.squeeze(0).transpose(0, 1), cos, sin).transpose(0, 1)[None]


CPU = Elementwise("in few passes", rms_norm, swiglu, rotary)
