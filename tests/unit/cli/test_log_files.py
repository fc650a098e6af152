"""Lines that `tinsmith up` shows of the log of a service that has ended."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tinsmith.rpc.logs import JsonFormatter, TextFormatter
from tinsmith_cli.log_files import for_people, last_lines

API = "torch/distributed/elastic/multiprocessing/api.py"


def test_the_cause_of_a_rank_that_fails_is_shown_without_the_table_of_torchrun(tmp_path: Path) -> None:
    cause = {"level": "CRITICAL", "message": "rank 1 of 2 ends: a file of weights is damaged"}
    other = {"level": "CRITICAL", "message": "rank 0 of 2 ends: rank 1 did not answer"}
    failed = f"E1128 12:48:28.339000 6788 {API}:1002] failed (exitcode: 1) local_rank: 1 (pid: 6915) of binary: python"
    table = ["Traceback (most recent call last):", *["  File"] * 20, "ChildFailedError:", "  rank      : 1", "====="]
    log = tmp_path / "log"
    log.write_text("\n".join([json.dumps(cause), failed, *table, json.dumps(other), *table]))
    shown = for_people(last_lines(log, 20))
    assert shown == [f"CRITICAL {cause['message']}", failed, f"CRITICAL {other['message']}"]


def test_a_traceback_without_torchrun_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\nMemoryError")
    assert for_people(last_lines(log, 20)) == ["Traceback (most recent call last):", "MemoryError"]


@pytest.mark.parametrize("format", [JsonFormatter(), TextFormatter()], ids=["json", "text"])
def test_the_last_lines_of_a_service_that_was_killed_are_shown_and_not_its_whole_configuration(
    format: logging.Formatter,
) -> None:
    def line(message: str, level: int = logging.INFO) -> str:
        return format.format(logging.LogRecord("trainer", level, "", 0, message, None, None))

    start = line("starting with " + "setting=1 " * 200)
    (shown,) = for_people([start])
    assert len(shown) < 200
    steps = [line(f"step {number}") for number in range(9)]
    shown = for_people([start, *steps])
    assert [text[-6:] for text in shown] == [f"step {number}" for number in range(4, 9)]
    (reason,) = for_people([start, *steps, line("the disk is full", logging.ERROR)])
    assert reason.endswith("the disk is full")
