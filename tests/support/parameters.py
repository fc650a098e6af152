"""Parameters of tests of which the fast suite has a part."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def fast_ones(every: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """All parameters. Those that are not `fast` are for the slow tests."""
    every = list(every)
    assert all(one in every for one in fast)
    return [one if one in fast else pytest.param(one, marks=pytest.mark.slow) for one in every]
