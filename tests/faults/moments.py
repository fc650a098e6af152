"""Random moments, and how often they are tried: once usually, twenty times in each mode with TINSMITH_ALL_FAULTS=1.

Every repetition has a seed of its own, which a failure shows; TINSMITH_FAULT_SEED=<seed> brings it back.
"""

from __future__ import annotations

import os
import secrets

import pytest

ALL_FAULTS = os.environ.get("TINSMITH_ALL_FAULTS") == "1"
EVERY = 20
"""Repetitions of each fault where time does not matter."""
REPETITIONS = range(EVERY if ALL_FAULTS else 1)

repeated = pytest.mark.parametrize("repetition", REPETITIONS)
"""For a test whose moment is random, or depends on how the processes run."""


def in_mode(usual: str) -> pytest.MarkDecorator:
    """Marks a test with the trainer's mode; in "deterministic" the numbers are equal bit for bit.

    A fault runs in one mode, and in both with TINSMITH_ALL_FAULTS=1.
    """
    modes = ["usual", "deterministic"] if ALL_FAULTS else [usual]
    return pytest.mark.parametrize("mode", modes, scope="module", indirect=True)


def fresh_seed() -> int:
    return int(os.environ.get("TINSMITH_FAULT_SEED") or secrets.randbits(32))
