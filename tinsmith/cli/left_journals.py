"""Journals of trainers whose base models are not served now, so that nobody takes their runs for lost."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path


def with_live_runs(trainers: Path, *, served: Collection[Path]) -> dict[Path, int]:
    """Folders below `trainers` that are not served, and how many live runs each has. One that cannot be read has none:
    its own trainer will say why."""
    found: dict[Path, int] = {}
    for journal in sorted(trainers.glob("*/journal.sqlite")):
        if journal.parent in served:
            continue
        try:
            with closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                (count,) = connection.execute("SELECT count(*) FROM models WHERE state = 'live'").fetchone()
        except sqlite3.Error:
            continue
        if count:
            found[journal.parent] = count
    return found
