"""Where the backward pass adds up the gradient of one adapter: one buffer, so that what follows is one operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.modeling.adapter import Adapter, LoraWeights


class PassGradient:
    """For one backward pass. Layers that differentiate by hand add to it, and give autograd no gradient of A and B."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._buffer: Adapter | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        """What such layers take from autograd in the place of A and B: their backward runs when its gradient is asked
        for. It has none."""

    def of(self, name: str) -> LoraWeights:
        """Of the A and B of this layer. However often it is called, the gradients add up."""
        return self._need_buffer().weights[name]

    def gather(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The whole gradient, flat, with what autograd has for the adapter's tensors in their order."""
        buffer = self._need_buffer()
        for there, grad in zip(buffer.tensors(), grads, strict=True):
            if grad is not None:
                there.add_(grad)
        return buffer.flat

    def _need_buffer(self) -> Adapter:
        """Made when the first gradient comes: the forward pass needs the memory more."""
        if self._buffer is None:
            self._buffer = self._adapter.like(torch.zeros_like(self._adapter.flat))
        return self._buffer
