"""Sums over a journal's content, and deletion of what is not needed: for the journal itself and for `tinsmith journal`.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tinsmith.rpc.times import timestamp
from tinsmith.rpc.words import value_of
from tinsmith.v1 import trainer_admin_pb2 as pb
from trainer_service.durability.journal_database import Database

_SIZES = (
    "SELECT coalesce(sum(coalesce(length(request), 0) + coalesce(length(result), 0)), 0), "
    "coalesce(sum(CASE state WHEN 0 THEN length(request) END), 0) FROM operations"
)


@dataclass(frozen=True, slots=True)
class Summary:
    """A model's share of the journal."""

    model_id: str
    state: str
    """"live", "lost" or "failed"."""
    reason: str
    """The reason for which the model was lost; empty for other models."""
    created_at: float
    """Seconds since 1970, as all times here."""
    snapshot_seq_id: int | None
    snapshot_at: float | None
    snapshot_bytes: int | None
    cut_seq_id: int
    num_accepted: int
    """Operations that have not run yet."""
    num_done: int
    """Operations that have succeeded."""
    num_failed: int
    """Operations that have failed."""
    request_bytes: int
    result_bytes: int

    def to_proto(self) -> pb.JournalModel:
        return pb.JournalModel(
            **asdict(self)
            | {
                "state": value_of(pb.JournalState, self.state),
                "created_at": timestamp(self.created_at),
                "snapshot_at": None if self.snapshot_at is None else timestamp(self.snapshot_at),
            }
        )


@dataclass(frozen=True, slots=True)
class Pruned:
    """Numbers of what was deleted, or of what a dry run would have deleted."""

    num_results: int
    num_bodies: int
    model_ids: tuple[str, ...]
    num_bytes: int


@dataclass(slots=True)
class Sizes:
    """Bytes in the journal."""

    total: int
    """Bytes of all requests and results."""
    pending: int
    """Bytes of the requests that have not run."""

    @classmethod
    def of(cls, database: Database, *, model_id: str | None = None) -> Sizes:
        """Counts the bytes of all models, or of one."""
        if model_id is None:
            return cls(*database.execute(_SIZES).fetchone())
        return cls(*database.execute(_SIZES + " WHERE model_id = ?", (model_id,)).fetchone())


def summaries(database: Database) -> list[Summary]:
    """Summaries of all models, in the order of their creation. Operations whose rows were deleted are not counted."""
    rows = database.execute(
        "SELECT models.model_id, models.state, reason, created_at, snapshot_seq_id, snapshot_at, snapshot_bytes, "
        "cut_seq_id, count(CASE operations.state WHEN 0 THEN 1 END), count(CASE operations.state WHEN 1 THEN 1 END), "
        "count(CASE operations.state WHEN 2 THEN 1 END), coalesce(sum(length(request)), 0), "
        "coalesce(sum(length(result)), 0) FROM models LEFT JOIN operations ON operations.model_id = models.model_id "
        "GROUP BY models.model_id, models.state, reason, created_at, snapshot_seq_id, snapshot_at, snapshot_bytes, "
        "cut_seq_id ORDER BY created_at"
    ).fetchall()
    return [Summary(*row) for row in rows]


def prune(database: Database, *, expired_before: float, dry_run: bool) -> Pruned:
    """Deletes models that ended, and results that were finished, before `expired_before`, and bodies that the newest
    snapshot covers.

    A model that was lost later stays, because its client may not know why yet. `dry_run`: deletes nothing in the end.
    """
    ended = database.execute("SELECT model_id FROM models WHERE ended_at < ?", (expired_before,))
    model_ids = [row[0] for row in ended]
    database.execute("SAVEPOINT prune")
    before = Sizes.of(database).total
    num_results = expire(database, before=expired_before)
    num_bodies = cut_covered(database)
    drop_empty(database)
    pruned = Pruned(num_results, num_bodies, tuple(model_ids), before - Sizes.of(database).total)
    if dry_run:
        database.execute("ROLLBACK TO prune")
    database.execute("RELEASE prune")
    return pruned


def expire(database: Database, *, before: float) -> int:
    """Deletes models that ended, and results that were finished, before `before`. Returns the number of results."""
    database.execute("DELETE FROM models WHERE ended_at < ?", (before,))
    return database.execute(
        "UPDATE operations SET result = NULL WHERE result IS NOT NULL AND finished_at < ?", (before,)
    ).rowcount


def cut_covered(database: Database) -> int:
    """Cuts bodies that no replay needs: those up to the newest snapshot, and those of ended models. Returns their
    number.

    Bodies of operations that have not run stay.
    """
    num_cut = database.execute(
        "UPDATE operations SET request = NULL WHERE request IS NOT NULL AND state != 0 AND seq_id <= "
        "(SELECT CASE state WHEN 'live' THEN snapshot_seq_id ELSE operations.seq_id END "
        "FROM models WHERE models.model_id = operations.model_id)"
    ).rowcount
    database.execute("UPDATE models SET cut_seq_id = snapshot_seq_id WHERE snapshot_seq_id > cut_seq_id")
    return num_cut


def drop_empty(database: Database) -> None:
    """Deletes rows of executed operations that have neither a body nor a result, up to each model's cut_seq_id."""
    database.execute(
        "DELETE FROM operations WHERE state != 0 AND request IS NULL AND result IS NULL AND seq_id <= "
        "(SELECT cut_seq_id FROM models WHERE models.model_id = operations.model_id)"
    )
