"""A slow reference for adapters: the plain model computes with W + scaling * B A in place of W.

It shares no code with the packed forward pass, which is checked against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.modeling.adapter import Adapter, LoraWeights
from tinsmith.modeling.quantized import quantized_parameters


@contextmanager
def adapted(model: nn.Module, adapter: Adapter) -> Iterator[None]:
    """Applies the adapter to `model`, a causal LM of transformers, within the block. No weight is copied or changed.

    Differentiable in the adapter's tensors. The adapter must be on the model's device.
    """
    with ExitStack() as stack:
        for target in adapter.targets:
            weights = adapter.weights[target.name]
            parent, _, name = target.name.rpartition(".")
            owner = model.get_submodule(parent)
            if (stored := quantized_parameters(owner).get(name)) is not None:
                change = partial(_add_delta, weights=weights, scaling=adapter.scaling, transposed=_is_transposed(owner))
                stack.callback(stored.register_forward_hook(change).remove)
            elif name in owner._parameters:
                stack.enter_context(_replaced(owner, name, weights, adapter.scaling))
            else:
                share = partial(_add_share, weights=weights, scaling=adapter.scaling)
                stack.callback(getattr(owner, name).register_forward_hook(share).remove)
        yield


def _add_share(
    module: nn.Module, args: tuple[Tensor], output: Tensor, *, weights: LoraWeights, scaling: float
) -> Tensor:
    """Forward hook that returns y + scaling * (x A^T) B^T, computed in float32 or a wider type."""
    dtype = torch.promote_types(output.dtype, weights.a_R_I.dtype)
    low = args[0].to(dtype) @ weights.a_R_I.to(dtype).T
    return (output.to(dtype) + scaling * (low @ weights.b_O_R.to(dtype).T)).to(output.dtype)


def _add_delta(
    module: nn.Module, args: tuple[()], output: Tensor, *, weights: LoraWeights, scaling: float, transposed: bool
) -> Tensor:
    """Forward hook of a quantised weight that returns W + scaling * B A."""
    return _sum(output, weights, scaling, transposed=transposed)


def _sum(weight: Tensor, weights: LoraWeights, scaling: float, *, transposed: bool) -> Tensor:
    if weight.ndim == 3 and not torch.is_grad_enabled():  # all experts at once would take several times their memory
        changed = torch.empty_like(weight)
        for expert, (into, one) in enumerate(zip(changed, weight, strict=True)):
            own = LoraWeights(*(part[expert] if part.ndim == 3 else part for part in (weights.a_R_I, weights.b_O_R)))
            into.copy_(_sum(one, own, scaling, transposed=transposed))
        return changed
    delta = scaling * (weights.b_O_R @ weights.a_R_I)
    if transposed:
        delta = delta.mT
    return (weight.to(torch.promote_types(weight.dtype, delta.dtype)) + delta).to(weight.dtype)


def _is_transposed(experts: nn.Module) -> bool:
    """Whether fused experts hold their weights as [E, I, O] in place of [E, O, I]."""
    return bool(getattr(experts, "is_transposed", False) or getattr(experts, "transposed", False))


@contextmanager
def _replaced(owner: nn.Module, name: str, weights: LoraWeights, scaling: float) -> Iterator[None]:
    """Replaces the weight of fused experts by W + scaling * B A while their own forward runs. All experts may share A
    or B."""
    originals: list[nn.Parameter | None] = []

    def before(*_: Any) -> None:
        original = owner._parameters[name]  # the layer around it may have gathered it only now (weight_parts.py)
        assert original is not None
        originals.append(original)
        changed = _sum(original, weights, scaling, transposed=_is_transposed(owner))
        owner._parameters[name] = changed  # type: ignore[assignment]

    def after(*_: Any) -> None:
        while originals:
            owner._parameters[name] = originals.pop()

    with ExitStack() as stack:
        stack.callback(after)
        stack.callback(owner.register_forward_pre_hook(before).remove)
        stack.callback(owner.register_forward_hook(after, prepend=True).remove)  # before the whole weight is returned
        yield
