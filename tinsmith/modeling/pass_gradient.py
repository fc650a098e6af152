"""Where the backward pass writes the gradient of one adapter: one buffer, so that what follows is one operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith.modeling.adapter import Adapter, LoraWeights


class PassGradient:
    """For one backward pass. Which layers write here and which return tensors of their own is theirs to choose."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._buffer: Adapter | None = None
        self._free: dict[str, LoraWeights] = {}

    def take(self, name: str) -> LoraWeights | None:
        """Where the gradients of this layer's A and B go. None when the layer has been here: its second gradient must
        not take the place of its first."""
        self._need_buffer()
        return self._free.pop(name, None)

    def gather(self, grads: Sequence[Tensor]) -> Tensor:
        """The whole gradient, flat, from what autograd has for the adapter's tensors in their order."""
        for there, grad in zip(self._need_buffer().tensors(), grads, strict=True):
            if grad.data_ptr() != there.data_ptr():
                there.copy_(grad)
        return self._need_buffer().flat

    def _need_buffer(self) -> Adapter:
        """Made when the first gradient comes: the forward pass needs the memory more."""
        if self._buffer is None:
            self._buffer = self._adapter.like(torch.empty_like(self._adapter.flat))
            self._free = dict(self._buffer.weights)
        return self._buffer
