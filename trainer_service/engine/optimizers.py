"""Optimizers, one for each model, over the adapter's one flat buffer. docs/algorithms.md has their formulas."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinsmith.modeling.full_weights import Weights
from tinsmith.rpc.errors import InvalidRequest, NotFinite
from tinsmith.v1 import trainer_pb2
from trainer_service.engine.newton_schulz import frobenius, orthogonalize

_LARGEST = 3.4e38
"""Of float32."""
_NOT_NEGATIVE = (0.0, _LARGEST)
_DECAY = (0.0, 1.0)
_ANY = (-_LARGEST, _LARGEST)
_ABOVE_ZERO = (1.2e-38, _LARGEST)
"""Smaller ones are 0 in float32. Where a parameter has never had a gradient, as every A at first, AdamW then divides 0
by 0."""

_ADAM_DEFAULTS = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
"""The SDK's, which docs/grpc.md repeats."""
_DIMUON_DEFAULTS = {"beta1": 0.9, "grad_clip_norm": 0.0}

VANISHING = 1e-22
"""Numbers below it may have squares of 0, and a Euclidean norm of 0."""
_ROUNDED = 1.001
"""Rounding error that float32 may add to a bound in one step."""

FAR = 1e18
"""Largest norm of a gradient, and magnitude of a parameter, that a step may leave: squares are finite in float32."""


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of one step of AdamW; they may change from step to step."""

    kind: ClassVar[str] = "adamw"
    field: ClassVar[str] = "adam_params"

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """Largest global L2 norm of the gradients; 0 or less means no limit."""

    @classmethod
    def from_proto(cls, params: trainer_pb2.AdamParams) -> AdamParams:
        """Raises InvalidRequest, naming the field and the value."""
        ranges = {
            "learning_rate": _NOT_NEGATIVE,
            "beta1": _DECAY,
            "beta2": _DECAY,
            "eps": _ABOVE_ZERO,
            "weight_decay": _NOT_NEGATIVE,
            "grad_clip_norm": _ANY,
        }
        return cls(**_checked(params, ranges, _ADAM_DEFAULTS, field=cls.field))


@dataclass(frozen=True, slots=True)
class DimuonParams:
    """Settings of one step of Dimuon; they may change from step to step."""

    kind: ClassVar[str] = "dimuon"
    field: ClassVar[str] = "dimuon_params"

    learning_rate: float
    beta1: float
    grad_clip_norm: float
    """Largest global L2 norm of the gradients; 0 or less means no limit."""

    @classmethod
    def from_proto(cls, params: trainer_pb2.DimuonParams) -> DimuonParams:
        """Raises InvalidRequest, naming the field and the value."""
        ranges = {"learning_rate": _NOT_NEGATIVE, "beta1": _DECAY, "grad_clip_norm": _ANY}
        return cls(**_checked(params, ranges, _DIMUON_DEFAULTS, field=cls.field))


Params = AdamParams | DimuonParams


def params_from_proto(request: trainer_pb2.OptimStepRequest) -> Params:
    """Raises InvalidRequest when they are missing or out of range."""
    match request.WhichOneof("params"):
        case "adam_params":
            return AdamParams.from_proto(request.adam_params)
        case "dimuon_params":
            return DimuonParams.from_proto(request.dimuon_params)
        case _:
            raise InvalidRequest(
                "params: missing; a model with optimizer 'adamw' needs adam_params, one with 'dimuon' dimuon_params",
                field="params",
            )


def _checked(
    params: trainer_pb2.AdamParams | trainer_pb2.DimuonParams,
    ranges: Mapping[str, tuple[float, float]],
    defaults: Mapping[str, float],
    *,
    field: str,
) -> dict[str, float]:
    """What is absent has its default. Raises InvalidRequest for what has none, or is out of range."""
    given = {descriptor.name: value for descriptor, value in params.ListFields()}
    values: dict[str, float] = {}
    for name, (low, high) in ranges.items():
        if name not in given and name not in defaults:
            raise InvalidRequest(f"{field}.{name}: is missing", field=f"{field}.{name}")
        values[name] = value = given.get(name, defaults.get(name, 0.0))
        if not (math.isfinite(value) and low <= value < high):
            raise InvalidRequest(f"{field}.{name}: {value} is outside [{low}, {high})", field=f"{field}.{name}")
    return values


class Optimizer(Protocol):
    """What a model asks of its optimizer."""

    def step(self, parameter: Tensor, gradient: Tensor, params: Any) -> None:
        """One step in place, on an adapter's flat buffer [numel]. `params` are of the optimizer's own kind."""
        ...

    def moved(self, parameter: float, moment: float, params: Any) -> float:
        """No parameter is above it after a step, in magnitude, when none is above `parameter` before, and `magnitude`
        is at most `moment` after it."""
        ...

    def magnitude(self) -> float:
        """No first moment is above it, and no second one above its square. Infinite or NaN when one is not finite."""
        ...

    def state(self) -> dict[str, Tensor]:
        """A copy in host memory."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Puts the buffers of [numel] where `move` copies them: all of them, or none when one copy fails."""
        ...


class AdamW:
    """torch.optim.AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with its settings given at every step.

    With torch's fused kernel, which reads and writes each buffer once: on a CPU a quarter of the time of the default,
    from which it differs in the last digit (1e-7 of a step).
    """

    def __init__(self, like: Tensor) -> None:
        self.exp_avg = torch.zeros_like(like)
        self.exp_avg_sq = torch.zeros_like(like)
        self.num_steps = torch.zeros(())

    @torch.no_grad()
    def step(self, parameter: Tensor, gradient: Tensor, params: AdamParams) -> None:
        adamw(
            [parameter],
            [gradient],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.num_steps.to(parameter.device, copy=True)],  # the kernel counts up what is beside the buffers
            foreach=False,
            capturable=False,
            differentiable=False,
            fused=True,
            has_complex=False,
            amsgrad=False,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=params.weight_decay,
            eps=params.eps,
            maximize=False,
        )
        self.num_steps += 1

    def moved(self, parameter: float, moment: float, params: AdamParams) -> float:
        rate = params.learning_rate / (1 - params.beta1 ** (self.num_steps.item() + 1))
        decay = abs(1 - params.learning_rate * params.weight_decay)
        if max(rate, decay) >= _LARGEST:  # infinite in the kernel, where it makes NaN of a zero
            return math.inf
        return _ROUNDED * (decay * parameter + rate * moment / params.eps)

    def magnitude(self) -> float:
        second = torch.linalg.vector_norm(self.exp_avg_sq, math.inf).item()
        return math.hypot(magnitude([self.exp_avg]), math.sqrt(second))

    def state(self) -> dict[str, Tensor]:
        """A copy in host memory: float32 [numel] moments, and the number of steps as float32 [1]."""
        return {
            "exp_avg": self.exp_avg.detach().to("cpu", copy=True),
            "exp_avg_sq": self.exp_avg_sq.detach().to("cpu", copy=True),
            "num_steps": self.num_steps.reshape(1).clone(),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.exp_avg.copy_(state["exp_avg"])
        self.exp_avg_sq.copy_(state["exp_avg_sq"])
        self.num_steps.copy_(state["num_steps"].reshape(()))

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.exp_avg, self.exp_avg_sq = move(self.exp_avg), move(self.exp_avg_sq)


class Dimuon:
    """Version 1 of Tinsmith's own matrix-orthogonalising momentum optimizer, of the Muon family.

    For each A and each B of an adapter of rank r (of each expert, where experts have their own), with gradient G and
    momentum M, which is zero at first:

        M <- beta1 M + (1 - beta1) G
        O <- orthogonalize(M)
        W <- W - learning_rate sqrt(r) O / ||O||_F
    """

    def __init__(self, like: Tensor, shapes: Sequence[tuple[int, ...]], *, rank: int) -> None:
        """`like` is the flat buffer of matrices, or stacks of them, of these shapes, end to end."""
        self.momentum = torch.zeros_like(like)
        self._shapes = shapes
        self._rank = rank

    @torch.no_grad()
    def step(self, parameter: Tensor, gradient: Tensor, params: DimuonParams) -> None:
        self.momentum.lerp_(gradient, 1 - params.beta1)
        weights, momenta = self._matrices(parameter), self._matrices(self.momentum)
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for n, momentum in enumerate(momenta):
            by_shape[momentum.shape].append(n)
        for same in by_shape.values():
            update_K_R_N = orthogonalize(torch.stack([momenta[n] for n in same]))
            norm_K = frobenius(update_K_R_N)
            update_K_R_N *= math.sqrt(self._rank) / torch.where(norm_K > 0, norm_K, 1.0)
            torch._foreach_add_([weights[n] for n in same], list(update_K_R_N), alpha=-params.learning_rate)

    def moved(self, parameter: float, moment: float, params: DimuonParams) -> float:
        return _ROUNDED * (parameter + params.learning_rate * math.sqrt(self._rank))

    def magnitude(self) -> float:
        return magnitude([self.momentum])

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        """Views of the buffer's matrices, the shorter side first: those of equal shape take their step together."""
        parts = flat.split([math.prod(shape) for shape in self._shapes])
        views = [
            matrix  # one for each expert, where they do not share it
            for part, shape in zip(parts, self._shapes, strict=True)
            for matrix in part.view(-1, *shape[-2:])
        ]
        return [view if view.shape[0] <= view.shape[1] else view.mT for view in views]

    def state(self) -> dict[str, Tensor]:
        """A copy in host memory: float32 [numel] momentum."""
        return {"momentum": self.momentum.detach().to("cpu", copy=True)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.momentum.copy_(state["momentum"])

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        self.momentum = move(self.momentum)


DEFAULT_OPTIMIZER = "adamw"
OPTIMIZERS: Mapping[str, Callable[[Weights], Optimizer]] = {
    "adamw": lambda adapter: AdamW(adapter.flat),
    "dimuon": lambda adapter: Dimuon(adapter.flat, [shape for _, shape in adapter.specs()], rank=adapter.config.rank),
}


def check_kind(kind: str) -> str:
    """Raises InvalidRequest for an optimizer that is not one of OPTIMIZERS."""
    if kind not in OPTIMIZERS:
        raise InvalidRequest(f"optimizer: {kind!r} is not one of {', '.join(OPTIMIZERS)}", field="optimizer")
    return kind


@torch.no_grad()
def clip_gradient(gradient: Tensor, max_norm: float, *, hint: str = "") -> float:
    """Scales the gradient in place to at most `max_norm` (no limit at 0 or less). Returns its L2 norm before.

    Raises NotFinite for a gradient that moments would not survive: its squares, or itself, are not finite in float32.
    `hint`: what may have made it so large, to end the message with.
    """
    scale, norm = 1.0, torch.linalg.vector_norm(gradient).item()
    if not math.isfinite(norm) and math.isfinite(peak := torch.linalg.vector_norm(gradient, math.inf).item()):
        gradient.div_(peak)  # its squares have overflowed, not the numbers themselves
        scale, norm = peak, torch.linalg.vector_norm(gradient).item()
    before = scale * norm
    if not (math.isfinite(before) and clipped_norm(before, max_norm) <= FAR):
        what = f"has a norm of {before:.3g}" if math.isfinite(before) else "is not finite"
        raise NotFinite(
            f"optim_step was not applied, and its gradients were cleared: the gradient {what}, and the optimizer's "
            f"moments would not recover from more than {FAR:g}. The parameters and the optimizer are as before. Set "
            "grad_clip_norm, or look for sampling logprobs far from the model's own (ratio:max in the metrics of "
            f"forward_backward){hint}"
        )
    if (after := clipped_norm(before, max_norm)) < before:
        gradient.mul_(after / norm)
    return before


def clipped_norm(norm: float, max_norm: float) -> float:
    return min(norm, max_norm) if max_norm > 0 else norm


@torch.no_grad()
def magnitude(tensors: list[Tensor]) -> float:
    """A bound on the magnitudes in all of them: infinite or NaN exactly when one of them is."""
    if not tensors:
        return 0.0
    # Euclidean norms, six times as fast on a CPU as the maximum; they overflow where the numbers do not yet.
    norm = torch.stack(torch._foreach_norm(tensors, 2)).max().item()
    if math.isfinite(norm):
        return norm + VANISHING
    return torch.stack(torch._foreach_norm(tensors, math.inf)).max().item()
