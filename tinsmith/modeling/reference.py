"""What an adapter means, said slowly: the plain model with W + scaling * B A in the place of W.

It shares no code with the packed forward pass, so that one can be held against the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.modeling.adapter import Adapter, LoraWeights


@contextmanager
def adapted(model: nn.Module, adapter: Adapter) -> Iterator[None]:
    """Within the block `model`, a causal LM of transformers, has the adapter. No weight is copied or changed.

    Differentiable in the adapter's tensors. The adapter must be on the model's device.
    """
    with ExitStack() as stack:
        for target in adapter.targets:
            weights = adapter.weights[target.name]
            parent, _, name = target.name.rpartition(".")
            owner = model.get_submodule(parent)
            if name in owner._parameters:
                stack.enter_context(_replaced(owner, name, weights, adapter.scaling))
            else:
                share = partial(_add_share, weights=weights, scaling=adapter.scaling)
                stack.callback(getattr(owner, name).register_forward_hook(share).remove)
        yield


def _add_share(
    module: nn.Module, args: tuple[Tensor], output: Tensor, *, weights: LoraWeights, scaling: float
) -> Tensor:
    """y + scaling * (x A^T) B^T, at least in float32."""
    dtype = torch.promote_types(output.dtype, weights.a_R_I.dtype)
    low = args[0].to(dtype) @ weights.a_R_I.to(dtype).T
    return (output.to(dtype) + scaling * (low @ weights.b_O_R.to(dtype).T)).to(output.dtype)


@contextmanager
def _replaced(owner: nn.Module, name: str, weights: LoraWeights, scaling: float) -> Iterator[None]:
    """Fused experts: their weight is another one while their own forward runs. One of A and B may be shared by all."""
    original = owner._parameters[name]
    assert original is not None

    def before(*_: Any) -> None:
        delta = scaling * (weights.b_O_R @ weights.a_R_I)
        if getattr(owner, "is_transposed", False) or getattr(owner, "transposed", False):
            delta = delta.mT
        dtype = torch.promote_types(original.dtype, delta.dtype)
        owner._parameters[name] = (original.to(dtype) + delta).to(original.dtype)  # type: ignore[assignment]

    def after(*_: Any) -> None:
        owner._parameters[name] = original

    with ExitStack() as stack:
        stack.callback(after)
        stack.callback(owner.register_forward_pre_hook(before).remove)
        stack.callback(owner.register_forward_hook(after).remove)
        yield
