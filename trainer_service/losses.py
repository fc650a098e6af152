"""Losses: pure functions from logprobs to a loss for each target. The loss of a batch is their plain sum.

Notation of the Tinker API: p the logprobs of the targets now, q those under the policy that sampled them, A the
advantages, w the weights, r = exp(p - q). Shapes: M targets of all datums, end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

LossFn = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


def cross_entropy(p_M: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-w p. Weights may be any real numbers: client-side custom losses send gradients in them."""
    return -inputs["weights"] * p_M


def importance_sampling(p_M: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-r A: REINFORCE, corrected for the gap between the sampling and the training policy."""
    return -_ratio(p_M, inputs) * inputs["advantages"]


def ppo(p_M: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-min(r A, clip(r) A); the thresholds bound the ratio itself (Schulman et al. 2017, arXiv:1707.06347)."""
    ratio, advantages = _ratio(p_M, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, config) * advantages)


def cispo(p_M: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-stop_gradient(clip(r)) p A: every token keeps a gradient (MiniMax-M1, arXiv:2506.13585)."""
    return -_clip(_ratio(p_M, inputs), config).detach() * p_M * inputs["advantages"]


def dro(p_M: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-(p A - beta/2 (p - q)^2): direct reward optimisation (Richemond et al. 2024, arXiv:2405.19107)."""
    gap = p_M - inputs["logprobs"]
    return -(p_M * inputs["advantages"] - 0.5 * config["beta"] * gap.square())


def _ratio(p_M: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(p_M - inputs["logprobs"])


def _clip(ratio_M: Tensor, config: Mapping[str, float]) -> Tensor:
    return ratio_M.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and what it takes."""

    fn: LossFn
    inputs: tuple[str, ...]
    """Arrays beside target_tokens, of the same shape."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Settings and their defaults."""
    optional: tuple[str, ...] = ()
    """Those of `inputs` that are all ones when absent."""
    max_dims: int = 1
    """2 when a position may have several targets."""


_CLIP = ("clip_low_threshold", "clip_high_threshold")
_POLICY_INPUTS = ("logprobs", "advantages")

LOSS_FNS: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",), optional=("weights",), max_dims=2),
    "importance_sampling": Loss(importance_sampling, _POLICY_INPUTS),
    "ppo": Loss(ppo, _POLICY_INPUTS, dict(zip(_CLIP, (0.8, 1.2), strict=True))),
    "cispo": Loss(cispo, _POLICY_INPUTS, dict(zip(_CLIP, (0.0, 4.0), strict=True))),
    "dro": Loss(dro, _POLICY_INPUTS, {"beta": 0.05}),
}
