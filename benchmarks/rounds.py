"""Runs that alternate, so that other load of the machine affects all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")

MIN_ROUNDS = 3


def alternate(runs: Sequence[Callable[[], Value]], *, repeats: int, budget_s: float) -> list[list[Value]]:
    """The values of each run, after a warm-up. Takes about `budget_s` seconds at most, but never fewer than MIN_ROUNDS
    rounds (or `repeats`)."""
    begin = time.perf_counter()
    for _ in range(max(1, repeats // 5)):
        for run in runs:
            run()
        if time.perf_counter() - begin > budget_s / 5:
            break
    begin, rows = time.perf_counter(), []
    while len(rows) < repeats and (len(rows) < MIN_ROUNDS or time.perf_counter() - begin < budget_s):
        rows.append([run() for run in runs])
    return [list(column) for column in zip(*rows, strict=True)]


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of a call, in seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def ms(work: Callable[[], object]) -> float:
    return 1e3 * seconds(work)
