"""The findings of all phases, and limits for the gaps between two correct computations of the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tinsmith_cli.doctor import oracle, samplers, trainer
from tinsmith_cli.doctor.coverage import TokenizerFindings
from tinsmith_cli.doctor.subject import Logprobs, Subject

_FLOORS = {
    torch.float32: (2e-4, 2e-5, 1e-4),
    torch.bfloat16: (0.05, 0.01, 0.02),
}
"""Least values of the limits, by type: largest gap of logprobs, mean gap of logprobs, relative error of a gradient.

The limits of float32 are an order of magnitude above the difference of two correct implementations (1e-6 to 1.3e-5 on
models of 1 to 110 M parameters). The limits of bfloat16 are one or two units in the last place of logits of size 10
(2^-8 * 10 = 0.04).
"""
_MARGIN = 3.0
"""The limit in a narrower type than float32 is this many times the plain model's gap to float32, if that is more than
the limit in _FLOORS."""
_UNMEASURED = (0.5, 0.1, 0.2)
"""Limits in narrower types if the plain model's gap to float32 could not be measured, in the order of _FLOORS.

The first and the last limit also apply to mixtures of experts. If two experts are nearly tied for a token, rounding
decides between them, and two correct computations may choose different experts. (Seen with a Mixtral of two layers: the
logprob of one token of 128, with router logits 0.002 apart, changed by 0.25. The plain model's gap to float32 was 0.03
in one run and 0.25 in another.) The limit of the mean stays strict, because a lost adapter changes the mean by more
than 0.1.
"""
COMPANY = 1e-5
"""Largest gap in float32 between an adapter alone in a batch and beside others, in relation to the largest logprob."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of all phases."""

    subject: Subject
    oracle: oracle.OracleFindings
    trainer: trainer.TrainerFindings
    samplers: Sequence[samplers.SamplerFindings]
    not_there: Mapping[str, str]
    """Engines that were not examined, with the reasons."""
    text: TokenizerFindings


@dataclass(frozen=True, slots=True)
class GapLimits:
    """Limits for the gaps of one adapter, or of the base model."""

    largest: float
    """Limit for the largest gap of a logprob, in nats."""
    mean: float
    """Limit for the mean gap of logprobs, in nats."""
    gradient: float
    """Limit for the relative error of a gradient."""
    source: str
    """Origin of the limits, in words."""


def gap(ours: Logprobs, theirs: Logprobs) -> tuple[float, float]:
    """Largest and mean absolute difference of logprobs, in nats. Raises ValueError if the sequences differ in number or
    length."""
    differences = [np.abs(one.astype(np.float64) - other) for one, other in zip(ours, theirs, strict=True)]
    whole = np.concatenate(differences)
    return (float(whole.max()), float(whole.mean())) if whole.size else (0.0, 0.0)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference in relation to the norm of `theirs`."""
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)).item()


def limits(findings: Findings, name: str) -> GapLimits:
    """The limits for one adapter, or for the base model, by its name."""
    dtype = findings.subject.dtype
    floor = _FLOORS[dtype]
    kind = str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        return GapLimits(*floor, source="float32")
    truth, wide = findings.oracle.truth, findings.oracle.wide
    if wide is None:
        return GapLimits(*_UNMEASURED, source=f"{kind}, rounding not measured: {findings.oracle.why_not_wide}")
    largest, mean = gap(truth.logprobs[name], wide.logprobs[name])
    gradient = relative(truth.gradients[name], wide.gradients[name]) if name in truth.gradients else 0.0
    allowed = [max(low, _MARGIN * noise) for low, noise in zip(floor, (largest, mean, gradient), strict=True)]
    source = f"{_MARGIN:g} x the plain model's own rounding in {kind}"
    if findings.subject.has_experts:
        loose = _UNMEASURED
        allowed = [max(allowed[0], loose[0]), allowed[1], max(allowed[2], loose[2])]
        source += ", and more for single tokens, for which rounding may choose other experts"
    return GapLimits(*allowed, source=source)
