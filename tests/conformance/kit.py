"""Defines a case, and runs one. Imports no SDK, because the runner outside the SDK's environment reads it too."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OK, ABSENT, FAILED = "ok", "absent", "failed"


class Absent(Exception):
    """The SDK does not have the feature."""


@dataclass(frozen=True)
class Case:
    feature: str
    group: str
    run: Callable[[Any], None]


@dataclass(frozen=True)
class Outcome:
    feature: str
    status: str
    reason: str = ""
    seconds: float = 0.0


CASES: list[Case] = []
"""In the order in which they are run and reported."""


def case(feature: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Registers a function of the world. It returns when the feature works, raises Absent, or anything else."""

    def register(run: Callable[[Any], None]) -> Callable[[Any], None]:
        assert feature not in {case.feature for case in CASES}, feature
        CASES.append(Case(feature, run.__module__.rpartition(".")[2], run))
        return run

    return register


def run_case(case: Case, world: Any, *, limit_s: float) -> Outcome:
    """The SDK retries for minutes and may wait for ever, so a case that is not done in time is left alone."""
    outcomes: list[Outcome] = []

    def work() -> None:
        try:
            case.run(world)
            outcomes.append(Outcome(case.feature, OK))
        except Absent:
            outcomes.append(Outcome(case.feature, ABSENT))
        except BaseException as error:
            outcomes.append(Outcome(case.feature, FAILED, _reason(error)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    return outcomes[0] if outcomes else Outcome(case.feature, FAILED, f"not done after {limit_s:g} s")


def _reason(error: BaseException) -> str:
    """One line: what is wrong, and the line of the case that found it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "conformance" in frame.filename]
    where = f" ({frames[-1].line})" if frames and isinstance(error, AssertionError) and not str(error) else ""
    text = " ".join(str(error).split()) or "not so"
    return f"{type(error).__name__}: {text[:300]}{where}"
