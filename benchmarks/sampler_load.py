"""The loads of sampler.py for every engine: a batch of groups, one request, and a mixed load with arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request for one sequence."""

    at_s: float
    """Time of arrival after the load's start, in seconds."""
    prompt_tokens: int
    new_tokens: int


def mixed_load(*, count: int, spread_s: float, seed: int) -> list[Arrival]:
    """Requests with prompts of 16 to 512 tokens and outputs of 8 to 256. Lengths are drawn log-uniformly, arrivals
    uniformly."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0.0, spread_s, size=count))
    prompts, outputs = (_log_uniform(rng, low, high, count) for low, high in ((16, 512), (8, 256)))
    return [Arrival(*values) for values in zip(times.tolist(), prompts, outputs, strict=True)]


def num_new_tokens(load: Sequence[Arrival]) -> int:
    return sum(one.new_tokens for one in load)


def _log_uniform(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    return np.exp(rng.uniform(np.log(low), np.log(high + 1), size=count)).astype(int).clip(low, high).tolist()
