"""What the engine keeps of one model: nothing before it is needed, and where the room is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.full_weights import Weights
from trainer_service.engine.optimizers import OPTIMIZERS, Optimizer

_MOMENTS = 2
"""Buffers of an adapter's size in an optimizer: AdamW's, which has the most."""


@dataclass(slots=True)
class ModelState:
    adapter: Weights
    optimizer_kind: str
    gradient: Weights | None = None
    """None until the first forward_backward."""
    optimizer: Optimizer | None = None
    """None until the first optim_step."""
    step: int = 0
    """Optimizer steps that the adapter has seen."""
    tainted: str = ""
    """Why the accumulated gradients are not those that the client thinks; empty when they are."""

    def __post_init__(self) -> None:
        self._require_grad()

    @property
    def num_bytes(self) -> int:
        """Of what there is now; at most."""
        buffers = 1 + (self.gradient is not None) + (_MOMENTS if self.optimizer is not None else 0)
        return buffers * self.adapter.num_bytes

    @property
    def growth_bytes(self) -> int:
        """What a forward_backward adds, at most: the gradient on its way, and the buffer that it is added to."""
        return (1 + (self.gradient is None)) * self.adapter.num_bytes

    @property
    def movable(self) -> bool:
        """A full model's weights are the base model's own parameters, which stay on the device."""
        return isinstance(self.adapter, Adapter)

    def need_gradient(self) -> Weights:
        if self.gradient is None:
            self.gradient = self.adapter.like(self.adapter.flat.new_zeros(self.adapter.flat.shape))
        return self.gradient

    def need_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            self.optimizer = self.new_optimizer()
        return self.optimizer

    def new_optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer_kind](self.adapter)

    def clear_gradient(self) -> None:
        if self.gradient is not None:
            self.gradient.flat.zero_()
        self.tainted = ""

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Puts every buffer where `move` copies it. The tensors are others afterwards; their values are the same.

        All or nothing: when there is no room for one, all stay where they are.
        """
        adapter = self.adapter.like(move(self.adapter.flat.detach()))
        gradient = None if self.gradient is None else self.gradient.like(move(self.gradient.flat))
        if self.optimizer is not None:
            self.optimizer.move(move)
        self.adapter, self.gradient = adapter, gradient
        self._require_grad()

    def _require_grad(self) -> None:
        for tensor in self.adapter.tensors():
            tensor.requires_grad_(True)


def full_bytes(adapter_bytes: int) -> int:
    """Of an adapter in training: itself, its gradient and its moments."""
    return (2 + _MOMENTS) * adapter_bytes
