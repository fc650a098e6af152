"""Log files to which processes append their output: reads their last lines, and limits their size.

The processes keep their file open, so a full one is copied to NAME.1 and emptied in place, as logrotate's
`copytruncate` does. The processes must have opened it for appending. Output between the copy and the emptying is lost.
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
"""In torchrun's line about the first rank that has failed."""
_TEXT_LINE = re.compile(r"[\d:.TZ-]+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) +\S+: ")
"""How a line of a service's log begins with --log-format text."""
_LONGEST = 150
"""Characters of a line of level INFO or DEBUG that a terminal shows."""
_FEW = 5
"""Lines of these levels that a terminal shows."""


def bound(log: Path, *, max_bytes: float) -> None:
    """Moves the content of a log that has reached `max_bytes` to NAME.1, in place of older content. Raises OSError, and
    leaves the log as it was."""
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
            older.unlink()  # an incomplete copy, whose space may be needed
        raise


def last_lines(log: Path, count: int, *, start: int = 0) -> list[str]:
    """The last lines of a log: at most `count`, from its last 64 KiB. Without torchrun's table of failed ranks, which
    has no causes.

    `start`: position in bytes before which nothing is read, unless the log has become shorter.
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
    """Lines of a service's log as a terminal shows them: JSON as its level and message, with the traceback below.

    Lines of level INFO and DEBUG are left out if there are other lines, which then have the reason for an end.
    Otherwise the last few are shown, and long ones are cut: a service logs its whole configuration in one line.
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
    """Level, text and traceback of a line of a log. Text without a level may be a traceback."""
    try:
        entry = json.loads(line)
        return entry["level"], f"{entry['level']} {entry['message']}", entry.get("traceback", "")
    except (ValueError, KeyError, TypeError):
        found = _TEXT_LINE.match(line)
        return found[1] if found else "", line, ""
