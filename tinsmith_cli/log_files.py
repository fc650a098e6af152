"""Files to which processes append their output: the end of one, and a bound on its size.

The processes keep their file open, so a full one is copied to NAME.1 and emptied in place, as logrotate's
`copytruncate` does. It has to be open for appending. What is written in the moment between the two is lost.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

_TAIL_BYTES = 64 * 2**10


def bound(log: Path, *, max_bytes: float) -> None:
    """A log that has reached `max_bytes` begins again, and takes the place of the older one beside it. Raises OSError,
    with the log as it was."""
    try:
        if log.stat().st_size < max_bytes:
            return
    except FileNotFoundError:
        return
    older = log.with_name(f"{log.name}.1")
    try:
        with log.open("rb") as source, older.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)  # to the end as it is then, not as it was at the start
            os.truncate(log, 0)
    except OSError:
        with suppress(OSError):
            older.unlink()  # half a copy; its room may be what is missing
        raise


def last_lines(log: Path, count: int) -> list[str]:
    """At most `count`, from the last 64 KiB."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]
