"""`python -m benchmarks`: every command and part of `all` can be called, and a part with results is not measured again.
Nothing here looks at a time."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest

from benchmarks import every
from benchmarks.__main__ import COMMANDS, module_of
from benchmarks.figure import Aim, Figure

TINY = (
    "trainer --size tiny --no-baseline --only throughput co_batching --adapters 2 --shapes 1x8"
    " --repeats 1 --budget-s 0 --models"
)


def parsed(words: list[str]) -> argparse.Namespace:
    module = importlib.import_module(module_of(words[0]))
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words[1:])


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"all", "service", "trainer"}))
def test_every_command_has_a_default_for_each_argument(name: str) -> None:
    assert getattr(parsed([name]), "size", "of no model")


@pytest.mark.parametrize("part", every.PARTS)
def test_every_part_is_a_command_with_arguments_that_it_knows(part: str) -> None:
    arguments = parsed(every.PARTS[part].split())
    assert getattr(arguments, "size", "of no model") or arguments.model_shape


def test_all_lists_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert every.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(every.PARTS)


@pytest.mark.parametrize(
    ("aim", "model", "text", "met"),
    [
        (Aim(2), "small", "at least 2 x", True),
        (Aim(3), "small", "at least 3 x", False),
        (Aim(1.5, at_most=True), "small", "at most 1.5 x", False),
        (Aim(10, "ms", at_most=True), "small", "at most 10 ms", True),
        (Aim(10, "ms", at_most=True, model="small"), "small", "at most 10 ms", True),
        (Aim(10, "ms", at_most=True, model="tiny"), "small", "", None),
    ],
)
def test_an_aim_is_a_bound_on_the_median_for_its_model(aim: Aim, model: str, text: str, met: bool | None) -> None:
    figure = Figure("f", "ms", [9, 10, 100], "base", [4.5, 5, 10], [aim])
    found = figure.to_json(model)
    assert (found["aim"], found["met"], found["ratio"]) == (text, met, 2)


def test_a_ratio_without_a_baseline_has_no_verdict() -> None:
    assert Figure("f", "ms", [1], aims=[Aim(2)]).to_json("small")["met"] is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_part_is_measured_once_and_a_part_that_fails_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = {"tiny": f"{TINY} {tmp_path}", "bad": "trainer --size tiny --shapes 0x0"}
    assert every.show(parts, tmp_path / "results", again=False, as_json=True) == 1
    found = json.loads(capfd.readouterr().out)
    assert found["failed"] == ["bad"]
    assert {row["part"] for row in found["figures"]} == {"tiny"}
    assert [(row["name"], row["aim"]) for row in found["figures"]] == [
        ("peak memory, 1x8", ""),
        ("2 adapters x 1 x 8", "at most 1.15 x"),
    ]
    assert not (tmp_path / "results" / "bad.json").exists()
    file = tmp_path / "results" / "tiny.json"
    before = file.stat().st_mtime_ns
    assert every.show({"tiny": parts["tiny"]}, tmp_path / "results", again=False, as_json=False) == 0
    assert file.stat().st_mtime_ns == before
    assert "| tiny | 2 adapters x 1 x 8 |" in capfd.readouterr().out
