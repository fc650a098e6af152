"""Loss functions: pure functions from logprobs to a loss for each target. The loss of a batch is their plain sum.

Notation of the Tinker API: p are the logprobs of the targets now, q those under the policy that sampled them, A the
advantages, w the weights, r = exp(p - q). Shapes: M targets of whole datums, end to end. docs/algorithms.md has the
formulas and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.errors import InvalidRequest
from trainer_service.objectives.mismatch import Mismatch

Arrays = Mapping[str, npt.NDArray[Any]]
"""The loss_fn_inputs of one datum, without target_tokens."""


@dataclass(frozen=True, slots=True)
class Term:
    """The part of a batch's loss that comes from some of its datums."""

    differentiable: Tensor
    """float64 scalar on the logprobs' device. Its gradient is that of the loss; its value may differ."""
    value: float
    """The loss."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Sums over these datums, by the keys of the response."""
    mismatch: Mismatch | None = None
    """The gap between trainer and sampler on sampled tokens; None without sampling logprobs or sampled tokens."""


class Objective(Protocol):
    """A loss, built in or custom, that a batch is trained on."""

    def evaluate(self, logprobs: Sequence[Tensor], inputs: Sequence[Arrays], config: Mapping[str, float]) -> Term:
        """The loss of some datums. `logprobs`: one tensor for each datum, with the shape of its targets. `inputs`: the
        other arrays of each datum."""
        ...


@dataclass(frozen=True, slots=True)
class Targets:
    """The arguments of a loss function: the targets of some datums, end to end."""

    p_M: Tensor
    arrays: Mapping[str, Tensor]
    """The loss_fn_inputs, [M] each."""
    config: Mapping[str, float]
    sizes: Sequence[int]
    """Number of targets of each datum; their sum is M."""

    @property
    def gap_M(self) -> Tensor:
        """p - q, but 0 where the weight is 0. The ratio there may be infinite, and 0 times infinity would be NaN."""
        gap_M = self.p_M - self.arrays["logprobs"]
        return torch.where(self.arrays["weights"] != 0, gap_M, torch.zeros_like(gap_M))

    @property
    def ratio_M(self) -> Tensor:
        return torch.exp(self.gap_M)


LossFn = Callable[[Targets], Tensor]


def cross_entropy(x: Targets) -> Tensor:
    """-p, or -w p with the weights. A weight may be any real number: client-side custom losses send gradients so."""
    return -x.p_M


def importance_sampling(x: Targets) -> Tensor:
    """-r A: REINFORCE, corrected for the gap between the sampling and the training policy."""
    return -x.ratio_M * x.arrays["advantages"]


def ppo(x: Targets) -> Tensor:
    """-min(r A, clip(r) A); the thresholds bound the ratio itself (Schulman et al. 2017, arXiv:1707.06347)."""
    return _pessimistic(x, x.gap_M)


def gspo(x: Targets) -> Tensor:
    """ppo with one ratio for all targets of a datum: s = exp(mean of p - q over the targets of sequence_ratio_mask
    whose weight is not 0).

    This is the GSPO-token form (Zheng et al. 2025, arXiv:2507.18071): s is a constant in the gradient, which reaches
    each target through its own p.
    """
    in_ratio_M = (x.arrays["sequence_ratio_mask"] != 0) & (x.arrays["weights"] != 0)
    mask_M, gap_M = in_ratio_M.to(x.p_M.dtype), x.gap_M.detach() * in_ratio_M
    sizes_D = torch.tensor(x.sizes, device=x.p_M.device)
    totals_D, counts_D = (torch.segment_reduce(values_M, "sum", lengths=sizes_D) for values_M in (gap_M, mask_M))
    # Only a datum of weight 0 everywhere has a count of 0. Its loss is 0, and 0 / 0 would make it NaN.
    mean_M = (totals_D / counts_D.clamp(min=1)).repeat_interleave(sizes_D, output_size=x.p_M.shape[0])
    return _pessimistic(x, mean_M + (x.p_M - x.p_M.detach()))


def cispo(x: Targets) -> Tensor:
    """-stop_gradient(clip(r)) p A: every token keeps a gradient (MiniMax-M1, arXiv:2506.13585)."""
    return -_clip(x, x.ratio_M).detach() * x.p_M * x.arrays["advantages"]


def dro(x: Targets) -> Tensor:
    """-(p A - beta/2 (p - q)^2): direct reward optimisation (Richemond et al. 2024, arXiv:2405.19107)."""
    return -(x.p_M * x.arrays["advantages"] - 0.5 * x.config["beta"] * x.gap_M.square())


def stable_reinforce(x: Targets) -> Tensor:
    """m (-min(r, cap) A + kl/2 (p - q)^2): Tinsmith's own definition.

    The first term is the truncated importance sampling estimate of the expected advantage (Ionides 2008; as weights of
    REINFORCE in Espeholt et al. 2018, arXiv:1802.01561). The second is the squared log-ratio, whose gradient on samples
    of the policy is that of KL(p || q) (Tang and Munos 2025, arXiv:2506.09477). Above the cap only the second term has
    a gradient. So a gradient is at most cap |A| + kl |p - q|, however old the data are.
    """
    mask_M = (x.arrays["sampled_mask"] != 0).to(x.p_M.dtype)
    # A capped r must not be computed: it may be infinite, and its gradient would be 0 times infinity, NaN.
    weight_M = torch.exp(x.gap_M.clamp(max=math.log(x.config["ratio_cap"])))
    return mask_M * (0.5 * x.config["kl_coeff"] * x.gap_M.square() - weight_M * x.arrays["advantages"])


def _pessimistic(x: Targets, log_ratio_M: Tensor) -> Tensor:
    """The smaller of the clipped and the unclipped objective, negated."""
    advantages = x.arrays["advantages"]
    # For A >= 0 the objective is constant above the upper threshold. A ratio far above it may be infinite, so the
    # log-ratio is limited before exp.
    constant_from = x.arrays["clip_high_threshold"].clamp(min=1).log() + 1
    ratio_M = torch.exp(torch.where(advantages >= 0, log_ratio_M.minimum(constant_from), log_ratio_M))
    return -torch.minimum(ratio_M * advantages, _clip(x, ratio_M) * advantages)


def _clip(x: Targets, ratio_M: Tensor) -> Tensor:
    return ratio_M.clamp(x.arrays["clip_low_threshold"], x.arrays["clip_high_threshold"])


Check = Callable[[Arrays, str], None]


def _ordered_settings(config: Mapping[str, float], where: str) -> None:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if low > high:
        raise InvalidRequest(
            f"{where}: clip_low_threshold {low} is above clip_high_threshold {high}; both bound the ratio", field=where
        )


def _stable_settings(config: Mapping[str, float], where: str) -> None:
    for name, least in (("kl_coeff", 0.0), ("ratio_cap", 1.0)):
        if config[name] < least:
            field = f"{where}.{name}"
            raise InvalidRequest(f"{field}: {config[name]} is below {least}", field=field)


def _ordered_thresholds(arrays: Arrays, where: str) -> None:
    low, high = arrays["clip_low_threshold"], arrays["clip_high_threshold"]
    if (low > high).any():
        n = int(np.argmax(low > high))
        field = f"{where}.clip_low_threshold"
        raise InvalidRequest(
            f"{field}[{n}]: {low[n]} is above clip_high_threshold[{n}] {high[n]}; both bound the ratio", field=field
        )


def _sequence_ratio(arrays: Arrays, where: str) -> None:
    _ordered_thresholds(arrays, where)
    if not arrays["sequence_ratio_mask"].any():
        field = f"{where}.sequence_ratio_mask"
        raise InvalidRequest(f"{field}: is zero everywhere; gspo needs a target to take the ratio from", field=field)
    weights = arrays["weights"]
    if weights.any() and not (weights * arrays["sequence_ratio_mask"]).any():
        field = f"{where}.weights"
        raise InvalidRequest(
            f"{field}: is zero at each target of sequence_ratio_mask but not everywhere; gspo needs a target to "
            "take the ratio from",
            field=field,
        )


def _only_sampled_targets(arrays: Arrays, where: str) -> None:
    advantages = arrays["advantages"]
    bad = (advantages != 0) & (arrays["sampled_mask"] == 0) & (arrays["weights"] != 0)
    if bad.any():
        n = int(np.argmax(bad))
        field = f"{where}.advantages"
        raise InvalidRequest(
            f"{field}[{n}]: {advantages[n]} is at a target that was not sampled (sampled_mask is 0); "
            "stable_reinforce trains sampled targets only; set the advantage or the weight to 0",
            field=field,
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """A built-in loss: its function, the arrays and settings that it takes, and their checks."""

    fn: LossFn
    """The loss of each target, before it is multiplied by the weights."""
    required: tuple[str, ...] = ()
    """Arrays that a datum must have, with the shape of target_tokens."""
    optional: tuple[str, ...] = ("weights",)
    """Arrays that a datum may have, with the shape of target_tokens. An absent one is filled with the setting of its
    name, or with 1 when there is no such setting. Every loss takes `weights`, factors of the targets' losses."""
    config: Mapping[str, float] = field(default_factory=dict)
    """The settings, with their defaults."""
    max_dims: int = 1
    """Dimensions that target_tokens may have: 2 when a position may have several targets."""
    sampled: str = ""
    """The array that is not 0 where a target was sampled. Empty: targets with an advantage or a logprob other than 0
    count as sampled. Targets of weight 0 never count."""
    check_config: Callable[[Mapping[str, float], str], None] | None = None
    """Raises InvalidRequest for invalid settings. Its second argument is their path in the request."""
    check: Check | None = None
    """Raises InvalidRequest for wrong arrays of one datum. Its second argument names them in the message."""

    @property
    def arrays(self) -> tuple[str, ...]:
        return self.required + self.optional

    def evaluate(self, logprobs: Sequence[Tensor], inputs: Sequence[Arrays], config: Mapping[str, float]) -> Term:
        p_M = torch.cat([piece.reshape(-1) for piece in logprobs])
        arrays = {
            name: torch.from_numpy(np.concatenate([datum[name].ravel() for datum in inputs])).to(p_M.device)
            for name in self.arrays
        }
        loss_M = self.of_targets(Targets(p_M, arrays, config, [piece.numel() for piece in logprobs]))
        # The sum is float64: over the many tokens of a batch, float32 would lose digits.
        total = loss_M.sum(dtype=torch.float64)
        return Term(total, total.item(), mismatch=self._mismatch(p_M, arrays))

    def of_targets(self, x: Targets) -> Tensor:
        """The loss of each target, [M], times its weight."""
        return x.arrays["weights"] * self.fn(x)

    def _mismatch(self, p_M: Tensor, arrays: Mapping[str, Tensor]) -> Mismatch | None:
        if "logprobs" not in arrays:
            return None
        q_M, advantages_M = arrays["logprobs"], arrays["advantages"]
        # Prompt positions have zeros in both arrays. A sampled token hardly ever has.
        sampled_M = arrays[self.sampled] != 0 if self.sampled else (advantages_M != 0) | (q_M != 0)
        sampled_M = sampled_M & (arrays["weights"] != 0)
        return Mismatch.of(*(tensor.detach().cpu().numpy() for tensor in (p_M, q_M, sampled_M)))


_POLICY = ("logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")


def _clipped(
    fn: LossFn, low: float, high: float, *more: str, check: Check = _ordered_thresholds, sampled: str = ""
) -> Loss:
    return Loss(
        fn,
        (*_POLICY, *more),
        ("weights", *_CLIP),
        dict(zip(_CLIP, (low, high), strict=True)),
        check_config=_ordered_settings,
        check=check,
        sampled=sampled,
    )


LOSS_FNS: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, max_dims=2),
    "importance_sampling": Loss(importance_sampling, _POLICY),
    "ppo": _clipped(ppo, 0.8, 1.2),
    "cispo": _clipped(cispo, 0.0, 4.0),
    "dro": Loss(dro, _POLICY, config={"beta": 0.05}),
    "gspo": _clipped(gspo, 0.8, 1.2, "sequence_ratio_mask", check=_sequence_ratio, sampled="sequence_ratio_mask"),
    "stable_reinforce": Loss(
        stable_reinforce,
        (*_POLICY, "sampled_mask"),
        config={"kl_coeff": 0.1, "ratio_cap": 2.0},
        check_config=_stable_settings,
        check=_only_sampled_targets,
        sampled="sampled_mask",
    ),
}
