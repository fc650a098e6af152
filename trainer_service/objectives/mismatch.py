"""The gap between the trainer's logprobs of sampled tokens and those that the sampler gave.

Notation as in losses.py: p is the logprob of a target now, q the one it was sampled with, r = exp(p - q).
docs/algorithms.md has the formulas and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_FARTHEST = 600.0
"""Larger |p - q| are clipped to this. e^600 is about 1e260, so sums of any length stay finite."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over one or more sampled tokens. Sums of parts add up, so how a request is divided does not matter."""

    num_tokens: int
    k3_sum: float
    """Sum of r - 1 - log r."""
    farthest: float
    """Largest p - q. The two sums below are relative to it, so that no squared ratio overflows."""
    ratio_sum: float
    """Sum of r / exp(farthest)."""
    square_sum: float
    """Sum of (r / exp(farthest))^2; at least 1."""

    @classmethod
    def of(cls, p_M: npt.NDArray[Any], q_M: npt.NDArray[Any], sampled_M: npt.NDArray[np.bool_]) -> Mismatch | None:
        """The sums over the sampled targets among M; None when none was sampled."""
        if not sampled_M.any():
            return None
        gap_n = np.clip(p_M[sampled_M].astype(np.float64) - q_M[sampled_M], -_FARTHEST, _FARTHEST)
        farthest = gap_n.max()
        relative_n = np.exp(gap_n - farthest)
        return cls(
            num_tokens=gap_n.size,
            k3_sum=float((np.expm1(gap_n) - gap_n).sum()),
            farthest=float(farthest),
            ratio_sum=float(relative_n.sum()),
            square_sum=float(relative_n @ relative_n),
        )

    def __add__(self, other: Mismatch) -> Mismatch:
        farthest = max(self.farthest, other.farthest)
        ours, theirs = math.exp(self.farthest - farthest), math.exp(other.farthest - farthest)
        return Mismatch(
            num_tokens=self.num_tokens + other.num_tokens,
            k3_sum=self.k3_sum + other.k3_sum,
            farthest=farthest,
            ratio_sum=ours * self.ratio_sum + theirs * other.ratio_sum,
            square_sum=ours**2 * self.square_sum + theirs**2 * other.square_sum,
        )

    @property
    def sampler_kl(self) -> float:
        """Estimate of KL(sampler || trainer), in nats per token; never negative."""
        return self.k3_sum / self.num_tokens

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens, in (0, 1]."""
        return self.ratio_sum**2 / (self.num_tokens * self.square_sum)

    @property
    def ratio_max(self) -> float:
        return math.exp(self.farthest)

    def metrics(self) -> Mapping[str, float]:
        """The metrics of a forward_backward response, by their keys there."""
        return {"sampler_kl:mean": self.sampler_kl, "ess:mean": self.ess, "ratio:max": self.ratio_max}
