"""Puts a backend's elementwise functions into a transformers model.

Norms, feed-forward layers and rotations are found by their structure, and each is compared with its replacement on
random numbers. A module that computes something else stays as it is. Names and parameters do not change, so nothing
changes for adapters and files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from tinsmith.modeling.kernels import elementwise
from tinsmith.modeling.kernels.elementwise import Elementwise

_ROTARY = "apply_rotary_pos_emb"
"""Name of the function with which attention layers of transformers rotate, in their Python module."""
_TOLERANCE = 0.02
"""Largest relative difference of a module and its replacement. It allows for rounding in bfloat16, and is exceeded by
any other computation."""


class FusedRMSNorm(nn.Module):
    """An RMSNorm that a backend computes, with the weight of the module that it replaces."""

    def __init__(self, weight_F: nn.Parameter, eps: float, *, gemma: bool, backend: Elementwise) -> None:
        super().__init__()
        self.weight = weight_F
        self.variance_epsilon = eps
        self.gemma = gemma
        self.backend = backend

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.backend.rms_norm(hidden_states, self.weight, self.variance_epsilon, gemma=self.gemma)


class FusedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with the three linear layers of the module that it replaces."""

    def __init__(self, base: nn.Module, backend: Elementwise) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (base.get_submodule(name) for name in _MLP)
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.backend.swiglu(self.gate_proj(x), self.up_proj(x)))


_MLP = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def install(model: nn.Module, backend: Elementwise) -> Counter[str]:
    """Replaces the parts of the model that the backend can compute. Returns the number of replaced parts by kind. To be
    called before layers are replaced by adapted ones."""
    replaced: Counter[str] = Counter()
    for name, module in list(model.named_modules()):
        norm = _norm(module, backend)
        if norm is not None:
            model.set_submodule(name, norm)
            replaced["norms"] += 1
        elif _is_swiglu(module):
            model.set_submodule(name, FusedMLP(module, backend))
            replaced["SwiGLU"] += 1
        elif (forward := _rotating(type(module))) is not None:
            module.forward = MethodType(_with_rotary(forward, backend.rotary), module)
            replaced["rotations"] += 1
    return replaced


def _norm(module: nn.Module, backend: Elementwise) -> FusedRMSNorm | None:
    """The replacement of a module; None if the module is not an RMSNorm that the backend can compute."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or list(parameters) != ["weight"] or not isinstance(eps, float):
        return None
    weight = parameters["weight"]
    x = _random(1, 3, weight.shape[0], like=weight)
    theirs = module(x)
    for gemma in (False, True):
        if weight.ndim == 1 and _near(elementwise.rms_norm(x, weight, eps, gemma=gemma), theirs):
            return FusedRMSNorm(weight, eps, gemma=gemma, backend=backend)
    return None


def _is_swiglu(module: nn.Module) -> bool:
    parts = dict(module.named_children())
    activation: Any = parts.pop("act_fn", None)
    if (
        activation is None
        or set(parts) != set(_MLP)
        or any(type_before_parametrizations(part) is not nn.Linear for part in parts.values())
    ):
        return False
    z = torch.linspace(-4, 4, 99)  # comparing the layers is not enough: near zero, all activations are linear
    if not _near(torch.nn.functional.silu(z), activation(z)):
        return False
    weight: Tensor = parts["gate_proj"].weight  # type: ignore[assignment]
    x = _random(1, 3, weight.shape[1], like=weight)
    return _near(FusedMLP(module, elementwise.EAGER)(x), module(x))


@cache
def _rotating(kind: type[nn.Module]) -> FunctionType | None:
    """The forward of this class of modules, if it is attention that rotates the halves of whole heads; else None."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    rotate: Callable[..., Any] | None = forward.__globals__.get(_ROTARY)
    if rotate is None or _rotated(rotate, features=4) is not None:  # accepts angles for only a part of each head
        return None
    ours, theirs = (_rotated(function, features=8) for function in (elementwise.rotary, rotate))
    assert ours is not None
    return forward if theirs is not None and _near(ours, theirs) else None


def _rotated(rotate: Callable[..., Any], *, features: int) -> Tensor | None:
    """Random heads of 8 features, rotated with angles for `features` of the 8. None if `rotate` does not accept these
    angles."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 3, 8, generator=generator) for n in (2, 1))
    angles = torch.randn(1, 3, features // 2, generator=generator).repeat(1, 1, 2)
    try:
        return torch.cat(rotate(q, k, angles.cos(), angles.sin()), 1)
    except (TypeError, RuntimeError):
        return None


def _with_rotary(forward: FunctionType, rotary: Callable[..., tuple[Tensor, Tensor]]) -> FunctionType:
    """A copy of `forward` that rotates with `rotary`. Other models of this architecture keep their own rotation."""
    theirs = forward.__globals__[_ROTARY]

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **settings: Any) -> Any:
        if others or settings:  # such as another order of dimensions
            return theirs(q, k, cos, sin, *others, **settings)
        return rotary(q, k, cos, sin)

    return with_functions(forward, {_ROTARY: rotate})


def with_functions(forward: FunctionType, functions: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """A copy of `forward` in which names of its Python module refer to `functions`. The module itself does not change,
    so other models of this architecture keep their functions."""
    scope = {**forward.__globals__, **functions}
    copy = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _random(*shape: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _near(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    return bool((ours - theirs).float().norm() <= _TOLERANCE * theirs.float().norm())
