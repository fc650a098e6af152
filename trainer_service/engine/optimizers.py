"""The optimizers. Each model has one, which works on the model's flat buffer. docs/algorithms.md has the formulas."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinsmith.errors import InvalidRequest, NotFinite
from tinsmith.modeling.full_weights import Weights
from tinsmith.modeling.kernels.transfer import in_host_memory
from trainer_service.engine.newton_schulz import frobenius, orthogonalize

LARGEST = 3.4e38
"""Largest number of float32, rounded down."""
VANISHING = 1e-22
"""The squares of smaller numbers underflow to 0 in float32, so a Euclidean norm may miss them."""
_PIECE = 4096
"""Elements whose squares are added up in float32 at once."""
_ROUNDED = 1.001
"""Factor on the bound of a step's result, for float32's rounding errors."""

FAR = 1e18
"""Largest norm of a gradient that a step takes, and largest parameter that it may leave: squares stay finite in
float32."""


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of one AdamW step. Each step may have others."""

    kind: ClassVar[str] = "adamw"
    field: ClassVar[str] = "adam_params"

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """Largest global L2 norm of the gradients; 0 or less means no limit."""


@dataclass(frozen=True, slots=True)
class DimuonParams:
    """Settings of one Dimuon step. Each step may have others."""

    kind: ClassVar[str] = "dimuon"
    field: ClassVar[str] = "dimuon_params"

    learning_rate: float
    beta1: float
    grad_clip_norm: float
    """Largest global L2 norm of the gradients; 0 or less means no limit."""


Params = AdamParams | DimuonParams


class Optimizer(Protocol):
    """The optimizer of one model."""

    def step(self, parameter: Tensor, gradient: Tensor, params: Any) -> None:
        """Makes one step in place. `parameter`, `gradient`: flat buffers [numel]. `params`: of the optimizer's kind."""
        ...

    def moved(self, parameter: float, moment: float, params: Any) -> float:
        """Upper bound of the parameters' magnitudes after a step.

        `parameter`: their bound before the step. `moment`: bound of `magnitude()` after the step.
        """
        ...

    def magnitude(self) -> float:
        """A number m such that no first moment exceeds m and no second moment exceeds m^2, in magnitude.

        It is infinite or NaN when a moment is not finite.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """A copy of the optimizer's tensors in host memory, by name."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces each buffer [numel] by the copy that `move` makes. When a copy fails, all buffers stay."""
        ...


class AdamW:
    """torch.optim.AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with settings given at every step.

    It uses torch's fused kernel, which reads and writes each buffer once. On a CPU that takes a quarter of the time of
    torch's default, and the results differ in the last digit (1e-7 of a step).
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
            [self.num_steps.to(parameter.device, copy=True)],  # the kernel increments a copy on its own device
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
        # The kernel multiplies in float32 before it divides. A product this large would be infinite there, and infinity
        # times 0 is NaN.
        if max(rate, decay, rate * moment) >= LARGEST:
            return math.inf
        return _ROUNDED * (decay * parameter + rate * moment / params.eps)

    def magnitude(self) -> float:
        second = torch.linalg.vector_norm(self.exp_avg_sq, math.inf).item()
        return math.hypot(magnitude([self.exp_avg]), math.sqrt(second))

    def state(self) -> dict[str, Tensor]:
        """A copy in host memory: float32 [numel] moments, and the number of steps as float32 [1]."""
        return {
            "exp_avg": in_host_memory(self.exp_avg),
            "exp_avg_sq": in_host_memory(self.exp_avg_sq),
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

    Each step updates every matrix W of an adapter of rank r: each A and each B, for each expert where experts have
    their own. G is the gradient of W, and M its momentum, which begins at zero.

        M <- beta1 M + (1 - beta1) G
        O <- orthogonalize(M)
        W <- W - learning_rate sqrt(r) O / ||O||_F
    """

    def __init__(self, like: Tensor, shapes: Sequence[tuple[int, ...]], *, rank: int) -> None:
        """`like`: the adapter's flat buffer. `shapes`: shapes of the matrices, or stacks of matrices, that lie in it,
        end to end. `rank`: the adapter's rank."""
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
        """Views of the buffer's matrices, transposed where needed so that the shorter side comes first."""
        parts = flat.split([math.prod(shape) for shape in self._shapes])
        views = [
            matrix  # a stack has one matrix for each expert
            for part, shape in zip(parts, self._shapes, strict=True)
            for matrix in part.view(-1, *shape[-2:])
        ]
        return [view if view.shape[0] <= view.shape[1] else view.mT for view in views]

    def state(self) -> dict[str, Tensor]:
        """A copy in host memory: float32 [numel] momentum."""
        return {"momentum": in_host_memory(self.momentum)}

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
    """Scales the gradient in place to an L2 norm of at most `max_norm`; 0 or less means no limit.

    Returns the norm before. Raises NotFinite when the gradient is not finite, or its clipped norm exceeds FAR: the
    optimizer's moments would not recover from it. `hint`: end of the error message, about a possible cause.
    """
    scale, norm = 1.0, l2_norm(gradient).item()
    if not math.isfinite(norm) and math.isfinite(peak := torch.linalg.vector_norm(gradient, math.inf).item()):
        gradient.div_(peak)  # the numbers are finite, but their squares have overflowed
        scale, norm = peak, l2_norm(gradient).item()
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


def l2_norm(vector_N: Tensor) -> Tensor:
    """The L2 norm, from norms of pieces. torch alone adds up all squares in a few float32 sums on a CPU, and small
    squares are lost in large sums: the norm of 5e7 elements came out 0.4 % too small, that of 2e8 elements 3 %."""
    whole, rest = vector_N.split([vector_N.numel() // _PIECE * _PIECE, vector_N.numel() % _PIECE])
    pieces = [torch.linalg.vector_norm(whole.view(-1, _PIECE), dim=1), torch.linalg.vector_norm(rest)[None]]
    return torch.linalg.vector_norm(torch.cat(pieces), dtype=torch.float64)


def clipped_norm(norm: float, max_norm: float) -> float:
    return min(norm, max_norm) if max_norm > 0 else norm


@torch.no_grad()
def magnitude(tensors: list[Tensor]) -> float:
    """Upper bound of the magnitudes in all tensors. It is infinite or NaN exactly when one of the numbers is."""
    if not tensors:
        return 0.0
    # A Euclidean norm takes a sixth of the time of a maximum on a CPU. It may overflow although the numbers are finite.
    norm = torch.stack(torch._foreach_norm(tensors, 2)).max().item()
    if math.isfinite(norm):
        return norm + VANISHING
    return torch.stack(torch._foreach_norm(tensors, math.inf)).max().item()
