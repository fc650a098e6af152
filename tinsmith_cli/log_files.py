"""Log files to which processes append their output: reads their last lines, and limits their size.

The processes keep their file open, so a full one is copied to NAME.1 and emptied in place, as logrotate's
`copytruncate` does. The processes must have opened it for appending. Output between the copy and the emptying is lost.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

_TAIL_BYTES = 64 * 2**10


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


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log: at most `count`, from its last 64 KiB."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]
