"""One model in memory. Gradient and optimizer are allocated when first needed; all buffers can move to the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor

from tinsmith.errors import NotFinite
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.full_weights import Weights
from tinsmith.sizing import MOMENTS
from trainer_service.engine.optimizers import FAR, OPTIMIZERS, VANISHING, Optimizer, Params, clipped_norm, magnitude

_LARGE_LOG_RATIO = 10.0
"""A larger log-ratio between the model's and the sampling probability of a target, in nats, is worth mentioning in
errors: no policy should move so far."""


@dataclass(slots=True)
class ModelState:
    """A model's weights, gradient and optimizer, and what is known about the range of their numbers."""

    adapter: Weights
    optimizer_kind: str
    gradient: Weights | None = None
    """None until the first forward_backward."""
    optimizer: Optimizer | None = None
    """None until the first optim_step."""
    step: int = 0
    """Number of optimizer steps applied to the adapter."""
    farthest: float = math.inf
    """Upper bound of the parameters' magnitudes; infinite until they are measured."""
    farthest_moment: float = math.inf
    """Upper bound of the optimizer's numbers, in the sense of Optimizer.magnitude; infinite until they are measured."""
    tainted: str = ""
    """Error of a failed batch, whose gradient is missing from the accumulated one; empty when none has failed."""
    largest_ratio: tuple[float, str] = (_LARGE_LOG_RATIO, "")
    """Largest log-ratio p - q of the accumulated batches, if above _LARGE_LOG_RATIO, and a text about its datum."""
    tainted_by: int = 0
    """seq_id of the newest batch that failed; 0 when none has."""

    def __post_init__(self) -> None:
        self._require_grad()

    @property
    def num_bytes(self) -> int:
        """Upper bound of the memory of the buffers that exist now, in bytes."""
        buffers = 1 + (self.gradient is not None) + (MOMENTS if self.optimizer is not None else 0)
        return buffers * self.adapter.num_bytes

    @property
    def growth_bytes(self) -> int:
        """Most bytes that a forward_backward adds: the pass's own gradient, and the model's gradient where missing."""
        return (1 + (self.gradient is None)) * self.adapter.num_bytes

    @property
    def movable(self) -> bool:
        """False for a full model: its weights are the base model's own parameters, which stay on the device."""
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
        """Records a failed batch and clears the gradients accumulated so far.

        Batches that come later still accumulate: the next step applies them if the client knew of the failure when it
        sent them.
        """
        self.clear_gradient()
        self.tainted, self.tainted_by = reason, seq_id

    def foreseen(self, norm: float, params: Params) -> tuple[float, float] | None:
        """Bounds (`farthest`, `farthest_moment`) after a step with a gradient of this norm.

        Returns None when a bound exceeds FAR: the step must then be tried on copies.
        """
        moment = max(self.farthest_moment, clipped_norm(norm, params.grad_clip_norm) + VANISHING)
        farthest = self.need_optimizer().moved(self.farthest, moment, params)
        return (farthest, moment) if farthest <= FAR and moment <= FAR else None

    def look(self) -> bool:
        """Measures `farthest` and `farthest_moment`. Returns whether both are within FAR."""
        self.farthest, self.farthest_moment = magnitude([self.adapter.flat]), self.need_optimizer().magnitude()
        return self.farthest <= FAR and self.farthest_moment <= FAR

    def tried(self, gradient: Tensor, params: Params) -> ModelState:
        """Makes the step on copies of the parameters and the optimizer, and returns the copies.

        Raises NotFinite when the numbers exceed FAR before the step or after it.
        """
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
        """Adopts the parameters of `trial`, copied into the existing buffer, and its optimizer."""
        self.adapter.flat.detach().copy_(trial.adapter.flat.detach())
        self.optimizer, self.farthest, self.farthest_moment = trial.optimizer, trial.farthest, trial.farthest_moment

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces every buffer by the copy that `move` makes of it, for example on another device.

        When a copy fails, all buffers stay as they are.
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
