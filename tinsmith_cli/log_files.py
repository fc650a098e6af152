"""Reads the last lines of log files to which processes append their output, and limits the files' sizes.

A process keeps its log open, so a full log is copied to NAME.1 and emptied in place, as logrotate's `copytruncate`
does. The process must have opened the log for appending. Output between the copy and the emptying is lost.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

_TAIL_BYTES = 64 * 2**10
_RANK_FAILED = re.compile(r"torch/distributed/elastic/\S+\] failed \(exitcode: ")
"""Matches a part of torchrun's line about the first rank that has failed."""
_TEXT_LINE = re.compile(r"[\d:.TZ-]+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) +\S+: ")
"""Matches the beginning of a line of a service's log with --log-format text."""
_LONGEST = 150
"""Most characters of a line of level INFO or DEBUG that a terminal shows."""
_FEW = 5
"""Most lines of level INFO or DEBUG that a terminal shows."""


def bound(log: Path, *, max_bytes: float) -> None:
    """Moves the content of a log that has reached `max_bytes` to NAME.1, in place of older content. After an OSError
    the log is as before."""
    try:
        if log.stat().st_size < max_bytes:
            return
    except FileNotFoundError:
        return
    older = log.with_name(f"{log.name}.1")
    try:
        with log.open("rb") as source, older.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)  # also copies what is appended meanwhile
            os.truncate(log, 0)
    except OSError:
        with suppress(OSError):
            older.unlink()  # the copy is incomplete, and its space may be needed
        raise


def last_lines(log: Path, count: int, *, start: int = 0) -> list[str]:
    """The last lines of a log: at most `count`, from the log's last 64 KiB. torchrun's table of failed ranks, which
    shows no causes, is left out.

    `start`: position in bytes before which nothing is read. It is ignored if the log has become shorter than that.
    """
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES, start if start <= size else 0))
        return _without_table(file.read().decode(errors="replace").splitlines())[-count:]


def _without_table(lines: list[str]) -> list[str]:
    for number, line in enumerate(lines, start=1):
        if _RANK_FAILED.search(line):  # torchrun's traceback and its table follow
            return lines[:number] + [later for later in lines[number:] if later.startswith("{")]
    return lines


def for_people(lines: list[str]) -> list[str]:
    """Lines of a service's log in the form for a terminal: level and message of a JSON line, with the traceback below.

    Lines of level INFO and DEBUG are left out if there are other lines, because these have the reason for which the
    service ended. Otherwise the last few lines are shown, and long ones are cut, such as the line with a service's
    whole configuration.
    """
    unremarkable, reasons = [], []
    for line in lines:
        level, text, traceback = _parts(line)
        if level in ("DEBUG", "INFO"):
            unremarkable.append(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")
        else:
            reasons += [*text.splitlines(), *traceback.splitlines()]
    return reasons or unremarkable[-_FEW:]


def _parts(line: str) -> tuple[str, str, str]:
    """Level, text and traceback of a line of a log. A line without a level, such as one of a traceback, has "" as its
    level."""
    try:
        entry = json.loads(line)
        return entry["level"], f"{entry['level']} {entry['message']}", entry.get("traceback", "")
    except (ValueError, KeyError, TypeError):
        found = _TEXT_LINE.match(line)
        return found[1] if found else "", line, ""
