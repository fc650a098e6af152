"""Reads and prunes the journals of stopped trainers, for `tinsmith journal` and `tinsmith up`.

All functions but `find` and `num_live_runs` raise SystemExit when a journal cannot be opened, as `journal_file.connect`
does.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from trainer_service.durability import journal_file, journal_pruning
from trainer_service.durability.journal_pruning import Pruned, Summary


def find(folder: Path) -> list[Path]:
    """The journal in a trainer's state folder, or those of all trainers below the state folder of `tinsmith up`."""
    name = journal_file.NAME
    return [path for path in (folder / name, *sorted(folder.glob(f"trainers/*/{name}"))) if path.is_file()]


def summaries(path: Path) -> list[Summary]:
    """Summaries of all models of a journal."""
    with closing(journal_file.connect(path)) as connection:
        return journal_pruning.summaries(connection)


def prune(path: Path, *, expired_before: float, dry_run: bool) -> Pruned:
    """Prunes a journal as `journal_pruning.prune` does, and returns the freed space to the disk."""
    with closing(journal_file.connect(path)) as connection:
        connection.execute("BEGIN")
        pruned = journal_pruning.prune(connection, expired_before=expired_before, dry_run=dry_run)
        connection.execute("COMMIT")
        if not dry_run:
            connection.execute("VACUUM")
        return pruned


def delete_model(path: Path, model_id: str, *, dry_run: bool) -> bool:
    """Deletes a model and its operations. Returns False when the journal has no model of this id."""
    with closing(journal_file.connect(path)) as connection:
        found = connection.execute("SELECT 1 FROM models WHERE model_id = ?", (model_id,)).fetchone() is not None
        if found and not dry_run:
            connection.execute("DELETE FROM models WHERE model_id = ?", (model_id,))
        return found


def num_live_runs(path: Path) -> int:
    """Number of live models. Does not lock the journal. Returns 0 for one that cannot be read: its own trainer reports
    the error."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM models WHERE state = 'live'").fetchone()
            return count
    except sqlite3.Error:
        return 0
