"""Random moments, and how often they are tried: a few times usually, twenty and more with TINSMITH_ALL_FAULTS=1.

Every repetition has a seed of its own, which a failure shows; TINSMITH_FAULT_SEED=<seed> brings it back.
"""

from __future__ import annotations

import os
import secrets

import pytest

ALL_FAULTS = os.environ.get("TINSMITH_ALL_FAULTS") == "1"
EVERY = 20
"""Repetitions of each fault where time does not matter."""


def repeated(usual: int) -> pytest.MarkDecorator:
    """A test that takes `repetition`."""
    return pytest.mark.parametrize("repetition", range(EVERY if ALL_FAULTS else usual))


def fresh_seed() -> int:
    return int(os.environ.get("TINSMITH_FAULT_SEED") or secrets.randbits(32))
