"""The elementwise parts of a layer through torch.compile: each becomes one kernel forward and one backward.

Whole layers are not compiled. The adapters and their rows change with every batch, and each change would compile the
layer again. The number of tokens is dynamic, so a new length compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinsmith.modeling.kernels import elementwise
from tinsmith.modeling.kernels.elementwise import Elementwise


class CannotCompile(Exception):
    """torch.compile does not work on this machine; the message says why."""


def compiled(device: torch.device, dtype: torch.dtype) -> Elementwise:
    """The compiled functions, tried on a few tokens, forward and backward.

    Raises CannotCompile, for instance if there is no compiler.
    """
    norm, glu, rotate = (_compile(f) for f in (elementwise.rms_norm, elementwise.swiglu, elementwise.rotary))

    def rms_norm(x: Tensor, weight_F: Tensor, eps: float, *, gemma: bool) -> Tensor:
        return norm(_dynamic(x.reshape(-1, x.shape[-1]), 0), weight_F, eps, gemma=gemma).view(x.shape)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        rows = [_dynamic(x.reshape(-1, x.shape[-1]), 0) for x in (gate, up)]
        return glu(*rows).view(gate.shape)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(_dynamic(q, 2), _dynamic(k, 2), _dynamic(cos, 1), _dynamic(sin, 1))

    backend = Elementwise("compiled", rms_norm, swiglu, rotary)
    try:
        attempt(backend, device, dtype)
    except Exception as error:  # torch raises errors of many types
        raise CannotCompile(first_lines(error)) from error
    return backend


def first_lines(error: Exception) -> str:
    """The first two lines of an error's message, because often the second line names the cause."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # dynamic=False: only the dimensions that _dynamic marks are dynamic. Constant features make better kernels.
    return torch.compile(function, dynamic=False)


def _dynamic(x: Tensor, dim: int) -> Tensor:
    torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def attempt(backend: Elementwise, device: torch.device, dtype: torch.dtype) -> None:
    """Computes a few tokens, forward and backward. Raises any error of the backend."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    with torch.enable_grad():
        x, gate, up, q, k = random(1, 3, 8), random(1, 3, 8), random(1, 3, 8), random(1, 3, 2, 8), random(1, 3, 1, 8)
        cos, sin = random(1, 3, 8).detach(), random(1, 3, 8).detach()
        outputs = [
            backend.rms_norm(x, random(8).detach(), 1e-6, gemma=False),
            backend.swiglu(gate, up),
            *backend.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
        ]
        torch.autograd.grad(torch.stack([output.sum() for output in outputs]).sum(), [x, gate, up, q, k])
