"""Keeps the journal within its limit of bytes."""

from __future__ import annotations

import logging
import time

from tinsmith.errors import OutOfCapacity
from trainer_service.durability.journal_database import Database
from trainer_service.durability.journal_pruning import Sizes, cut_covered, drop_empty, expire

logger = logging.getLogger(__name__)

_PRUNE_INTERVAL_S = 60.0
_LOW_WATER = 0.9
"""Share of max_bytes down to which the journal is cut, so that not every commit has to cut again."""
_PRESSED = 0.5
"""Share of max_bytes above which a snapshot is taken at every step."""


class Bound:
    """The journal's size and its limit. Only `is_pressed` is used outside the writer's thread.

    Above the limit, bodies that a snapshot covers are cut first, then results, then bodies that a replay would need.
    Bodies of operations that have not run are never cut.
    """

    def __init__(self, sizes: Sizes, *, max_bytes: int, result_retention_s: float) -> None:
        self.sizes = sizes
        """Bytes in the journal. Code that adds or deletes rows updates it in the same transaction."""
        self.max_bytes = max_bytes
        self._result_retention_s = result_retention_s
        self._next_prune = 0.0

    @property
    def is_pressed(self) -> bool:
        """True when the journal is so full that snapshots should be taken, which let bodies be cut. May be read on any
        thread."""
        return self.sizes.total > self.max_bytes * _PRESSED

    def check(self, database: Database, model_id: str, num_bytes: int, *, within_share: bool) -> None:
        """Raises OutOfCapacity when the journal has no place for one more operation, as Journal.append describes it."""
        pending, max_bytes = self.sizes.pending, self.max_bytes
        if pending + num_bytes > max_bytes:
            raise OutOfCapacity(
                f"the journal holds {pending} bytes of operations that have not run; "
                f"{num_bytes} more are above journal_max_bytes {max_bytes}"
            )
        if within_share and 2 * (pending + num_bytes) > max_bytes:  # with less, no model can be above its share
            own = Sizes.of(database, model_id=model_id).pending
            if own + num_bytes > max_bytes - pending - num_bytes:
                raise OutOfCapacity(
                    f"{model_id}: its operations that have not run take {own} bytes of the journal and this one "
                    f"takes {num_bytes}, which is more than its share of this server's journal_max_bytes "
                    f"{max_bytes}: those of all models take {pending}"
                )

    def prune(self, database: Database) -> None:
        """Deletes expired results and models that ended long ago, at most once a minute. Above the bound it runs at
        once, and cuts more, in the order that the class's docstring has."""
        if time.time() < self._next_prune and self.sizes.total <= self.max_bytes:
            return
        self._next_prune = time.time() + _PRUNE_INTERVAL_S
        expire(database, before=time.time() - self._result_retention_s)
        self.sizes = Sizes.of(database)
        if self.sizes.total > self.max_bytes:
            cut_covered(database)
            self.sizes = Sizes.of(database)
            self._cut_results(database)
            self._cut_needed_bodies(database)
        drop_empty(database)

    def delete_model(self, database: Database, model_id: str) -> None:
        """Deletes a model and its operations, if the journal has them."""
        gone = Sizes.of(database, model_id=model_id)
        database.execute("DELETE FROM models WHERE model_id = ?", (model_id,))
        self.sizes.total -= gone.total
        self.sizes.pending -= gone.pending

    def cut_up_to(self, database: Database, model_id: str, seq_id: int) -> None:
        """Cuts a model's bodies up to that of the operation `seq_id`."""
        (num_bytes,) = database.execute(
            "SELECT coalesce(sum(length(request)), 0) FROM operations WHERE model_id = ? AND seq_id <= ?",
            (model_id, seq_id),
        ).fetchone()
        database.execute("UPDATE operations SET request = NULL WHERE model_id = ? AND seq_id <= ?", (model_id, seq_id))
        database.execute("UPDATE models SET cut_seq_id = ? WHERE model_id = ?", (seq_id, model_id))
        self.sizes.total -= num_bytes

    def _cut_results(self, database: Database) -> None:
        rows = self._oldest(
            database, "SELECT id, model_id, seq_id, length(result) FROM operations WHERE result IS NOT NULL"
        )
        database.executemany("UPDATE operations SET result = NULL WHERE id = ?", [(row[0],) for row in rows])
        if rows:
            logger.warning("cut %d results from the journal before they expired", len(rows))

    def _cut_needed_bodies(self, database: Database) -> None:
        rows = self._oldest(
            database,
            "SELECT id, model_id, seq_id, length(request) FROM operations WHERE request IS NOT NULL AND seq_id > 0",
        )
        database.executemany("UPDATE operations SET request = NULL WHERE id = ?", [(row[0],) for row in rows])
        database.executemany(
            "UPDATE models SET cut_seq_id = ? WHERE model_id = ? AND cut_seq_id < ?",
            [(row[2], row[1], row[2]) for row in rows],
        )
        if rows:
            logger.warning(
                "the journal is full (journal_max_bytes %d) and %d executed operations since the last snapshot were "
                "cut from it: until their next optim_step a crash loses the models %s",
                self.max_bytes,
                len(rows),
                ", ".join(sorted({row[1] for row in rows})),
            )

    def _oldest(self, database: Database, select: str) -> list[tuple[int, str, int, int]]:
        """Selects executed operations to cut, the oldest first, until the journal would be below _LOW_WATER.

        `select`: a query for (id, model_id, seq_id, bytes to be cut).
        """
        chosen: list[tuple[int, str, int, int]] = []
        for row in database.execute(f"{select} AND state != 0 ORDER BY id"):
            if self.sizes.total <= self.max_bytes * _LOW_WATER:
                break
            self.sizes.total -= row[3]
            chosen.append(row)
        return chosen
