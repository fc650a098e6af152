"""How far the trainer's logprobs of sampled tokens are from those that the sampler gave with them.

Notation as in losses.py: p the logprob of a target now, q that of the policy that sampled it, r = exp(p - q).
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
"""|p - q| counts as this at most: e^600 is 1e260, of which sums of any length are finite."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Of some sampled tokens, at least one. Parts add up, in any order: how a request is divided changes nothing."""

    num_tokens: int
    k3_sum: float
    """Of r - 1 - log r."""
    farthest: float
    """Largest p - q. The two sums below are relative to it, so that no square of a ratio overflows."""
    ratio_sum: float
    """Of r / exp(farthest)."""
    square_sum: float
    """Of its square; at least 1."""

    @classmethod
    def of(cls, p_M: npt.NDArray[Any], q_M: npt.NDArray[Any], sampled_M: npt.NDArray[np.bool_]) -> Mismatch | None:
        """None when nothing was sampled."""
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
        """Estimate of KL(sampler || trainer) in nats a token; never negative."""
        return self.k3_sum / self.num_tokens

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens, in (0, 1]."""
        return self.ratio_sum**2 / (self.num_tokens * self.square_sum)

    @property
    def ratio_max(self) -> float:
        return math.exp(self.farthest)

    def metrics(self) -> Mapping[str, float]:
        """By the keys of the response."""
        return {"sampler_kl:mean": self.sampler_kl, "ess:mean": self.ess, "ratio:max": self.ratio_max}
