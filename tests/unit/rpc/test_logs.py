from __future__ import annotations

import contextvars
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from tinsmith.rpc import logs

logger = logging.getLogger("tests.some_part")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Calls setup() with its arguments and logs one line, with ids and an exception. Gives the output."""
    before = logging.root.handlers[:], logging.root.level

    def write(*arguments: str, ids: bool = True, error: bool = False, **fields: object) -> str:
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        logs.setup(*arguments, **fields)  # type: ignore[arg-type]

        def log() -> None:
            if ids:
                logs.request_id.set("m:train:0:7")
                logs.model_id.set("m:train:0")
                logs.owner.set("someone")
            try:
                raise ValueError("the cause")
            except ValueError:
                logger.info("took %.1f s", 1.25, exc_info=error)

        contextvars.Context().run(log)
        return stream.getvalue()

    yield write
    logging.root.handlers[:], logging.root.level = before


def test_json_lines_hold_the_ids_of_what_is_served(written: Callable[..., str]) -> None:
    line = json.loads(written("INFO", "json", rank=1))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "INFO",
        "logger": "tests.some_part",
        "message": "took 1.2 s",
        "rank": 1,
        "request_id": "m:train:0:7",
        "model_id": "m:train:0",
        "owner": "someone",
    }


def test_text_lines_hold_the_same(written: Callable[..., str]) -> None:
    line = written("INFO", "text", rank=1)
    assert line.endswith(
        "Z INFO    tests.some_part: took 1.2 s [rank=1 request_id=m:train:0:7 model_id=m:train:0 owner=someone]\n"
    )


def test_an_id_cannot_begin_a_line_of_its_own(written: Callable[..., str]) -> None:
    line = written("INFO", "text", rank="0\nERROR forged")
    assert line.count("\n") == 1


@pytest.mark.parametrize("format", ["json", "text"])
def test_unknown_ids_are_left_out_and_a_traceback_is_not(written: Callable[..., str], format: str) -> None:
    line = written("INFO", format, ids=False, error=True)
    assert "request_id" not in line
    assert "ValueError: the cause" in line
    assert (line.count("\n") == 1) == (format == "json")


def test_a_line_below_the_level_is_not_logged(written: Callable[..., str]) -> None:
    assert written("WARNING", "json") == ""
