"""The operations between the matrix products of a decoder layer, as functions that several backends provide.

Shapes: n rows, F features, T packed tokens, N query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RMSNorm(Protocol):
    def __call__(self, x: Tensor, weight_F: Tensor, eps: float, *, gemma: bool) -> Tensor:
        """x / rms(x) over the last dimension, with the shape and dtype of x. It is computed in float32, rounded to x's
        dtype and multiplied by the weight. A backend may multiply before it rounds.

        `gemma`: the factor is 1 + weight, and is multiplied in float32 before the result is rounded.
        """
        ...


class SwiGLU(Protocol):
    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up"""
        ...


class Rotary(Protocol):
    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates the halves of each head: q [1, N, T, D], k [1, K, T, D], cos and sin [1, T, D]. A backend may
        overwrite q and k."""
        ...


@dataclass(frozen=True, slots=True)
class Elementwise:
    """One backend. Differentiable in x, gate, up, q and k; the weight of a norm is frozen."""

    name: str
    rms_norm: RMSNorm
    swiglu: SwiGLU
    rotary: Rotary


def rms_norm(x: Tensor, weight_F: Tensor, eps: float, *, gemma: bool) -> Tensor:
    """RMSNorm in plain torch (Zhang and Sennrich, arXiv:1910.07467)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if gemma:
        return (wide * (1.0 + weight_F.float())).to(x.dtype)
    return weight_F * wide.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU in plain torch (Shazeer, arXiv:2002.05202), without the linear layers."""
    return torch.nn.functional.silu(gate) * up


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding in plain torch (Su et al., arXiv:2104.09864)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of each head of x [..., D] by angles of any shape that x can be multiplied by."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


EAGER = Elementwise("eager", rms_norm, swiglu, rotary)
"""Plain torch, which defines what every backend computes."""


def eager_on_host(backend: Elementwise) -> Elementwise:
    """The backend, with plain torch for tensors in host memory. Needed for a model that is checked in host memory
    before it moves to the backend's device."""

    def at(x: Tensor) -> Elementwise:
        return EAGER if x.device.type == "cpu" else backend

    return Elementwise(
        backend.name,
        lambda x, weight_F, eps, *, gemma: at(x).rms_norm(x, weight_F, eps, gemma=gemma),
        lambda gate, up: at(gate).swiglu(gate, up),
        lambda q, k, cos, sin: at(q).rotary(q, k, cos, sin),
    )
