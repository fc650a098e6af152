"""What the engine keeps of one model: nothing before it is needed, and where the room is."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.full_weights import Weights
from tinsmith.rpc.errors import NotFinite
from trainer_service.engine.optimizers import FAR, OPTIMIZERS, VANISHING, Optimizer, Params, clipped_norm, magnitude

_MOMENTS = 2
"""Buffers of an adapter's size in an optimizer: AdamW's, which has the most."""
_LARGE_LOG_RATIO = 10.0
"""Of a target's probability now to that of its sampling, in nats: more than any policy should have moved."""


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
    farthest: float = math.inf
    """No parameter is above it, in magnitude. Infinite where nobody has looked since they came from elsewhere."""
    farthest_moment: float = math.inf
    """The same of the optimizer, as Optimizer.magnitude has it."""
    tainted: str = ""
    """Why the accumulated gradients are not those that the client thinks; empty when they are."""
    largest_ratio: tuple[float, str] = (_LARGE_LOG_RATIO, "")
    """Of the accumulated batches, above what is usual: p - q, and in words which datum has it."""
    tainted_by: int = 0
    """seq_id of the batch that has failed, the newest of several."""

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
        self.tainted, self.tainted_by = "", 0
        self.largest_ratio = _LARGE_LOG_RATIO, ""

    def taint(self, reason: str, *, seq_id: int) -> None:
        """What has accumulated will not be applied; what comes after it is, where the client starts afresh there."""
        self.clear_gradient()
        self.tainted, self.tainted_by = reason, seq_id

    def foreseen(self, norm: float, params: Params) -> tuple[float, float] | None:
        """`farthest` and `farthest_moment` after a step of a gradient with this norm. None when that may be too far."""
        moment = max(self.farthest_moment, clipped_norm(norm, params.grad_clip_norm) + VANISHING)
        farthest = self.need_optimizer().moved(self.farthest, moment, params)
        return (farthest, moment) if farthest <= FAR and moment <= FAR else None

    def look(self) -> bool:
        """Measures the two. Returns whether the numbers are such as a step may leave."""
        self.farthest, self.farthest_moment = magnitude([self.adapter.flat]), self.need_optimizer().magnitude()
        return self.farthest <= FAR and self.farthest_moment <= FAR

    def tried(self, gradient: Tensor, params: Params) -> ModelState:
        """Copies of the parameters and the optimizer, after the step. Raises NotFinite when it leads too far."""
        if not self.look():
            raise NotFinite(
                "optim_step was not applied, and its gradients were cleared: the model's parameters or its optimizer's "
                f"moments were not finite, or beyond {FAR:g}, before it. Load a checkpoint from before that"
            )
        flat = self.adapter.flat.detach().clone()
        trial = ModelState(self.adapter.like(flat), self.optimizer_kind, optimizer=deepcopy(self.need_optimizer()))
        trial.need_optimizer().step(flat, gradient, params)
        if not trial.look():
            raise NotFinite(
                "optim_step was not applied, and its gradients were cleared: it would make parameters as large as "
                f"{trial.farthest:.3g}; beyond {FAR:g} they leave float32. The parameters and the optimizer are as "
                f"before. Look for a learning rate ({params.learning_rate:g}) that is too large, or for settings of "
                f"{params.field} that divide by almost nothing"
            )
        return trial

    def take(self, trial: ModelState) -> None:
        """Goes on from `trial`, in the buffers that it has."""
        self.adapter.flat.detach().copy_(trial.adapter.flat.detach())
        self.optimizer, self.farthest, self.farthest_moment = trial.optimizer, trial.farthest, trial.farthest_moment

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
