"""Reads and prunes the journals of stopped trainers, for `tinsmith journal` and `tinsmith up`.

All functions but `find` and `num_live_runs` raise SystemExit when a journal cannot be opened, or when its trainer is at
work.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith.rpc.postgres import described
from trainer_service.durability import journal_file, journal_postgres, journal_pruning
from trainer_service.durability.journal_database import Database
from trainer_service.durability.journal_pruning import Pruned, Summary


@dataclass(frozen=True, slots=True)
class OfTrainer:
    """The journal of one trainer in PostgreSQL."""

    url: str = field(repr=False)
    trainer: str

    def __str__(self) -> str:
        return f"{described(self.url)}, trainer {self.trainer}"


def find(folder: Path) -> list[Path]:
    """The journal in a trainer's state folder, or those of all trainers below the state folder of `tinsmith up`."""
    name = journal_file.NAME
    return [path for path in (folder / name, *sorted(folder.glob(f"trainers/*/{name}"))) if path.is_file()]


def find_in(url: str) -> list[OfTrainer]:
    """The journals of all trainers in a PostgreSQL database."""
    return [OfTrainer(url, name) for name in journal_postgres.trainer_names(url)]


def summaries(where: Path | OfTrainer) -> list[Summary]:
    """Summaries of all models of a journal."""
    with closing(_opened(where)) as database:
        return journal_pruning.summaries(database)


def prune(where: Path | OfTrainer, *, expired_before: float, dry_run: bool) -> Pruned:
    """Prunes a journal as `journal_pruning.prune` does, and returns the freed space to the disk."""
    with closing(_opened(where)) as database:
        database.begin()
        pruned = journal_pruning.prune(database, expired_before=expired_before, dry_run=dry_run)
        database.commit()
        if not dry_run:
            database.compact()
        return pruned


def delete_model(where: Path | OfTrainer, model_id: str, *, dry_run: bool) -> bool:
    """Deletes a model and its operations. Returns False when the journal has no model of this id."""
    with closing(_opened(where)) as database:
        found = database.execute("SELECT 1 FROM models WHERE model_id = ?", (model_id,)).fetchone() is not None
        if found and not dry_run:
            database.execute("DELETE FROM models WHERE model_id = ?", (model_id,))
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


def _opened(where: Path | OfTrainer) -> Database:
    if isinstance(where, Path):
        return journal_file.connect(where)
    return journal_postgres.PostgresDatabase(where.url, where.trainer)
