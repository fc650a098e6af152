"""The kit can fail: a case that cannot is worth nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conformance.__main__ import run_cases
from tests.conformance.kit import ABSENT, FAILED, OK, Absent, Case, Outcome, run_case
from tests.conformance.report import failures, page
from tests.unit.gateway.stack import Stack

_WITHOUT_TORCH = """\
import runpy, sys
sys.modules["torch"] = None
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """One in which importing the SDK takes no seconds."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{_WITHOUT_TORCH}' \"$@\"\n")
    script.chmod(0o755)
    return script


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """Its trainer answers every batch with made-up logprobs, and a loss that is the number of datums."""
    async with Stack(tmp_path).serving() as stack:
        yield stack


async def test_a_server_with_wrong_numbers_fails_the_cases_about_numbers(stack: Stack, python: Path) -> None:
    only = "^server capabilities|^loss: cross_entropy|^sample: several"
    run = asyncio.to_thread(run_cases, python, stack.url, arguments=["--only", only])
    outcomes = {outcome.feature: outcome for outcome in await run}
    assert outcomes.pop("server capabilities").status == OK
    assert len(outcomes) == 2
    for outcome in outcomes.values():
        assert outcome.status == FAILED, outcome
        assert "instead of" in outcome.reason or "SampledSequence" in outcome.reason, outcome


def test_a_worker_that_cannot_run_is_a_failure(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    python.chmod(0o755)
    (outcome,) = run_cases(python, "http://127.0.0.1:9", arguments=[])
    assert (outcome.status, outcome.reason) == (FAILED, "exit status 3 no such module")


def test_a_case_is_ok_absent_failed_or_not_done() -> None:
    def absent(world: None) -> None:
        raise Absent

    def wrong(world: None) -> None:
        assert 1 == 2, "two\nlines"

    def late(world: None) -> None:
        time.sleep(0.5)

    found = [run_case(Case(run.__name__, "", run), None, limit_s=0.1) for run in (absent, wrong, late, lambda _: None)]
    assert [outcome.status for outcome in found] == [ABSENT, FAILED, FAILED, OK]
    assert found[1].reason.startswith("AssertionError: two lines")
    assert found[2].reason == "not done after 0.1 s"


def test_the_page_has_a_cell_for_each_feature_and_version() -> None:
    results = {
        "0.3.0": [Outcome("a", OK, seconds=1.0), Outcome("b", ABSENT)],
        "0.4.0": [Outcome("a", FAILED, "it broke", seconds=2.0)],
    }
    lines = page(results).splitlines()
    assert "| feature | 0.3.0 | 0.4.0 |" in lines
    assert "| a | yes | **no** |" in lines
    assert "| b | - | **no** |" in lines, "what was not run does not work"
    assert lines[-1] == "- 0.4.0, a: `it broke`"
    assert [sdk for sdk, _ in failures(results)] == ["0.4.0"]
    assert page({"0.3.0": results["0.3.0"]}) == page({"0.3.0": [Outcome("a", OK, seconds=9.0), Outcome("b", ABSENT)]})
