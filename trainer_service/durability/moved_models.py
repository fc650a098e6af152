"""The journal's part in moves of models between trainers, also from a lost one (operations/moving.py).

A released model keeps its row, in the state "moved", and its operations, until the move is forgotten: so that another
package can be written, and calls for the model can be told where it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tinsmith.errors import DataCorrupted, FailedPrecondition
from tinsmith.threads import in_pool
from trainer_service.durability import run_file
from trainer_service.durability.journal_bound import Bound
from trainer_service.durability.journal_database import Database
from trainer_service.durability.journal_pruning import Sizes
from trainer_service.durability.journal_writer import Writer
from trainer_service.durability.run_file import Move


class MovedModels:
    """The released models of one journal. All methods run on the journal's event loop."""

    def __init__(self, writer: Writer, bound: Bound) -> None:
        self._writer = writer
        self._bound = bound

    async def all(self) -> dict[str, Move]:
        """The models that were released, by model_id."""
        rows = await self._writer.submit_until_done(
            lambda database: database.execute("SELECT model_id, reason FROM models WHERE state = 'moved'").fetchall()
        )
        return {model_id: Move.parse(reason) for model_id, reason in rows}

    async def export(self, model_id: str, path: Path, move: Move) -> None:
        """Writes the rows of a model to a new file (run_file.py), for the journal of another trainer. Nothing of the
        model may run or arrive meanwhile. Raises FailedPrecondition for a model without a snapshot."""

        def look(database: Database) -> tuple[Any, list[tuple[int, int]]]:
            model = database.execute(
                "SELECT created_at, snapshot_seq_id FROM models WHERE model_id = ?", (model_id,)
            ).fetchone()
            sizes = "SELECT seq_id, coalesce(length(request), 0) + coalesce(length(result), 0) FROM operations"
            return model, database.execute(f"{sizes} WHERE model_id = ? ORDER BY seq_id", (model_id,)).fetchall()

        model, sizes = await self._writer.submit_until_done(look)
        if model is None or model[1] is None:
            raise FailedPrecondition(f"the journal has no snapshot of {model_id!r}", model_id=model_id)
        created_at, covered = model
        await in_pool(run_file.create, path, model_id, move, created_at=created_at, snapshot_seq_id=covered)
        for first, last in _ranges(sizes):
            values = covered, model_id, first, last
            rows = await self._writer.submit_until_done(
                lambda database, values=values: database.execute(run_file.SELECT, values).fetchall()
            )
            await in_pool(run_file.add, path, model_id, rows)

    async def release(self, model_id: str, move: Move) -> None:
        """Records that a live model was released: its package is durable. Tries again until this is on disk, because
        nobody could tell otherwise whether the model is still this trainer's."""

        def run(database: Database) -> None:
            database.execute(
                "UPDATE models SET state = 'moved', reason = ? WHERE model_id = ? AND state = 'live'",
                (str(move), model_id),
            )

        await self._writer.submit_until_done(run, even_if_full=True)

    async def adopt(self, model_id: str, path: Path, *, snapshot_bytes: int) -> None:
        """Adds a model and its operations from the file that another trainer's `export` has written. Its snapshot must
        be durable. Does nothing when the journal has the model already.

        Raises FailedPrecondition for a model that this trainer has released itself, and DataCorrupted.
        """

        def run(database: Database) -> None:
            row = database.execute("SELECT state FROM models WHERE model_id = ?", (model_id,)).fetchone()
            if row is not None and row[0] == "moved":
                raise FailedPrecondition(f"model_id: {model_id!r} was released by this trainer", model_id=model_id)
            if row is not None:
                return
            _, created_at, covered = run_file.move_of(path, model_id)
            if database.delete_moved is not None:
                database.execute(database.delete_moved, (model_id,))
            database.execute(
                "INSERT INTO models (model_id, created_at, cut_seq_id, snapshot_seq_id, snapshot_at, snapshot_bytes) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (model_id, created_at, covered, covered, time.time(), snapshot_bytes),
            )
            try:
                for chunk in run_file.chunks(path):
                    database.executemany(run_file.INSERT, [(*row, model_id) for row in chunk])
            except DataCorrupted as error:  # a ServiceError would leave what was written in the transaction
                raise RuntimeError(f"the operations of {model_id!r} cannot be read any more") from error
            self._count(database, model_id)

        await in_pool(run_file.check, path)
        await self._writer.submit(run)

    async def fence(self, trainer_id: str) -> None:
        """Supersedes the last process of another trainer in the same database, which is dead. Raises NotReady and
        FailedPrecondition as `Database.fence`."""
        await self._writer.submit(lambda database: database.fence(trainer_id))

    async def take_over(self, model_id: str, trainer_id: str) -> bool:
        """Takes a model, with all its operations, from a fenced trainer. False when that trainer has no such model, or
        has released it. Raises NotReady as `Database.take_over`."""

        def run(database: Database) -> bool:
            if database.execute("SELECT 1 FROM models WHERE model_id = ?", (model_id,)).fetchone():
                return True  # an earlier call took the model, but its caller got no answer
            if not database.take_over(model_id, trainer_id):
                return False
            self._count(database, model_id)
            return True

        return await self._writer.submit(run)

    def _count(self, database: Database, model_id: str) -> None:
        """Adds a model that is new in the journal to the journal's size."""
        added = Sizes.of(database, model_id=model_id)
        self._bound.sizes.total += added.total
        self._bound.sizes.pending += added.pending

    async def forget(self, model_id: str, move_id: str) -> bool:
        """Deletes what is left of a model that was released in this move. False when there is nothing."""

        def run(database: Database) -> bool:
            row = database.execute("SELECT state, reason FROM models WHERE model_id = ?", (model_id,)).fetchone()
            if row is None or row[0] != "moved" or Move.parse(row[1]).move_id != move_id:
                return False
            self._bound.delete_model(database, model_id)
            return True

        return await self._writer.submit(run)


def _ranges(sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """First and last seq_id of operations that are read into memory at once. `sizes`: seq_id and bytes of each, in the
    order of seq_id."""
    first, last, total = None, 0, 0
    for seq_id, num_bytes in sizes:
        if first is not None and total + num_bytes > run_file.CHUNK_BYTES:
            yield first, last
            first, total = None, 0
        first, last, total = seq_id if first is None else first, seq_id, total + num_bytes
    if first is not None:
        yield first, last
