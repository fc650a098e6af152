"""The gradient of one adapter in one flat buffer, so that the next operations on it are single ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.modeling.adapter import Adapter, LoraWeights


class PassGradient:
    """The gradient of one adapter in one backward pass. Layers that are differentiated by hand add the gradients of A
    and B to it, and return none to autograd."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._buffer: Adapter | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        """Input of such layers in place of A and B, so that autograd runs their backward. It gets no gradient."""

    def of(self, name: str) -> LoraWeights:
        """The gradient of A and B of the layer `name`, to be added to."""
        return self._need_buffer().weights[name]

    def gather(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The whole gradient, flat. `grads`: gradients that autograd computed, in the order of the adapter's
        tensors."""
        buffer = self._need_buffer()
        for there, grad in zip(buffer.tensors(), grads, strict=True):
            if grad is not None:
                there.add_(grad)
        return buffer.flat

    def _need_buffer(self) -> Adapter:
        """The buffer. It is made at the first gradient, so that it takes no memory during the forward pass."""
        if self._buffer is None:
            self._buffer = self._adapter.like(torch.zeros_like(self._adapter.flat))
        return self._buffer
