"""The journal: every accepted operation of the trainer, in order, with its answer, durable at every commit.

It is a SQLite file (journal_file.py, which describes the tables), or lies in PostgreSQL (journal_postgres.py). A second
trainer on the same file is refused. In PostgreSQL it is refused while the first one is alive, and otherwise takes over:
the first one, should it still be there, can do nothing more. One thread owns the connection (journal_writer.py), and a
write returns only when its transaction is on disk.

A request's body is cut once two snapshots of its model cover it, so that a damaged snapshot loses nothing. When the
journal exceeds max_bytes, one snapshot is enough (Bound). If even that does not suffice, as in a very long
batch, bodies are cut that a replay would need. The model can then not be restored until its next snapshot.

Reads of what a restart needs wait for the end of an outage: a model that could not be read would count as lost.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path

from google.protobuf.message import DecodeError

from tinsmith.errors import DataCorrupted, ModelNotFound, ServiceError
from tinsmith.rpc import errors, tracing
from tinsmith.threads import in_pool
from tinsmith.v1 import trainer_pb2
from trainer_service.durability import journal_file
from trainer_service.durability.journal_bound import Bound
from trainer_service.durability.journal_database import Database
from trainer_service.durability.journal_pruning import Pruned, Sizes, Summary, prune, summaries
from trainer_service.durability.journal_writer import Writer
from trainer_service.durability.moved_models import MovedModels
from trainer_service.durability.records import Body, Entry, EntryState, LiveModel, Record, lost, result_sum, sum_of
from trainer_service.metrics import Metrics
from trainer_service.older_forms import carried_over

_LIVE_MODELS = (
    "SELECT model_id, cut_seq_id, snapshot_seq_id, "
    "(SELECT max(seq_id) FROM operations WHERE operations.model_id = models.model_id) FROM models WHERE state = 'live'"
)


class Journal:
    """The open journal. Its coroutines run on one event loop; `close` waits for all earlier calls."""

    def __init__(
        self,
        where: Path | tuple[Database, Path],
        *,
        max_bytes: int,
        result_retention_s: float,
        metrics: Metrics,
    ) -> None:
        """`where`: a SQLite file, which is created if it does not exist, or an open database, with the trainer's own
        folder on the disk of this machine."""
        folder = where.parent if isinstance(where, Path) else where[1]
        folder.mkdir(parents=True, exist_ok=True)
        database = journal_file.connect(where) if isinstance(where, Path) else where[0]
        self.folder = folder
        self._result_retention_s = result_retention_s
        metrics.durability.journal_limit_bytes.set(max_bytes)
        metrics.durability.state_free_bytes.set_function(lambda: shutil.disk_usage(folder).free)
        self._name = database.name
        self.shared_id = database.journal_id
        """Random id of the journal's tables in PostgreSQL; empty for a file."""
        self.bound = Bound(Sizes.of(database), max_bytes=max_bytes, result_retention_s=result_retention_s)
        self._appended: Counter[str] = Counter()
        self.writer = Writer(database, self.bound, metrics)
        self.moved = MovedModels(self.writer, self.bound)

    def close(self) -> None:
        self.writer.close()

    async def check_ours(self) -> None:
        """Raises Superseded when another trainer has taken over the journal, and NotReady when this cannot be known."""
        if self.shared_id:
            await self.writer.submit(lambda _: None)

    def appended_bytes(self, model_id: str) -> int:
        """Bytes of the bodies that this process has appended for a model. May be called on any thread."""
        return self._appended[model_id]

    async def append(self, model_id: str, seq_id: int, body: Body, *, within_share: bool = False) -> None:
        """Adds an operation, and returns when it is on disk. Operation 0 also adds the model.

        The caller makes sure that the operation is new. Raises OutOfCapacity when the disk or the journal is full, and
        ModelNotFound when the model was deleted. `within_share`: raises OutOfCapacity also when the model's operations
        that have not run would take more bytes than the journal has left for others, by the rule of `HeldBytes`.
        """
        num_bytes = len(body.compressed)

        def run(database: Database) -> None:
            self.bound.check(database, model_id, num_bytes, within_share=within_share)
            now = time.time()
            if seq_id == 0:
                new = "INSERT INTO models (model_id, created_at) VALUES (?, ?) ON CONFLICT (model_id) DO NOTHING"
                if (
                    not database.execute(new, (model_id, now)).rowcount
                    and _waiting_bytes(database, model_id, 0) is None
                ):
                    raise ServiceError(f"model_id: {model_id!r} exists already in the journal", model_id=model_id)
            row = (body.kind, body.digest, body.compressed, now, request_sum, model_id, seq_id)
            inserted = database.execute(
                "INSERT INTO operations (kind, digest, request, accepted_at, request_sum, model_id, seq_id) "
                "SELECT ?, ?, ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM models WHERE model_id = ?) "
                "ON CONFLICT (model_id, seq_id) DO NOTHING",
                (*row, model_id),
            )
            replaced_bytes = 0
            if not inserted.rowcount:
                if not database.execute("SELECT 1 FROM models WHERE model_id = ?", (model_id,)).fetchone():
                    raise ModelNotFound(f"model_id: {model_id!r} was deleted", model_id=model_id)
                # An earlier attempt to append this operation was written in an outage, and its caller got an error.
                # This attempt's caller will get an answer, so this attempt replaces the earlier one.
                waiting = _waiting_bytes(database, model_id, seq_id)
                if waiting is None:
                    raise ServiceError(f"{model_id}, seq_id {seq_id}, is in the journal already", model_id=model_id)
                replaced_bytes = waiting
                database.execute(
                    "UPDATE operations SET kind = ?, digest = ?, request = ?, accepted_at = ?, request_sum = ? "
                    "WHERE model_id = ? AND seq_id = ?",
                    row,
                )
            self.bound.sizes.total += num_bytes - replaced_bytes
            self.bound.sizes.pending += num_bytes - replaced_bytes

        request_sum = sum_of(model_id, seq_id, body.kind, body.compressed)
        with tracing.span("journal"):
            await self.writer.submit(run)
        self._appended[model_id] += num_bytes  # not in `run`, which may run several times

    async def finish(
        self,
        model_id: str,
        seq_id: int,
        outcome: trainer_pb2.WaitResultResponse | ServiceError | None,
        *,
        keep_body: bool = True,
    ) -> None:
        """Marks an operation as finished and stores its answer. `outcome` None: it is done, but has no answer to keep.

        `keep_body` false: the request is cut, because a replay does not need it. Does nothing when the model was
        deleted meanwhile. Raises Unstorable.
        """

        def run(database: Database) -> None:
            failed = isinstance(outcome, ServiceError)
            state = EntryState.FAILED if failed else EntryState.DONE
            result = None if outcome is None else _result(outcome)
            checksum = None if result is None else result_sum(model_id, seq_id, state, result)
            row = database.execute(
                "SELECT length(request) FROM operations WHERE model_id = ? AND seq_id = ? AND state = 0",
                (model_id, seq_id),
            ).fetchone()
            if row is None:
                return
            database.execute(
                "UPDATE operations SET state = ?, result = ?, result_sum = ?, finished_at = ?, "
                "request = CASE WHEN ? THEN request END WHERE model_id = ? AND seq_id = ?",
                (state, result, checksum, time.time(), keep_body, model_id, seq_id),
            )
            self.bound.sizes.pending -= row[0]
            self.bound.sizes.total += len(result or b"")
            if not keep_body:
                self.bound.sizes.total -= row[0]
            if failed and seq_id == 0:
                database.execute(
                    "UPDATE models SET state = 'failed', ended_at = ? WHERE model_id = ?", (time.time(), model_id)
                )

        await self.writer.submit(run, urgent=False)  # the client has the answer already

    async def find(self, model_id: str, seq_id: int) -> Record | None:
        """The operation; None when it was never accepted, or nothing of it is left."""

        def run(database: Database) -> tuple[str, bytes, int, bytes | None, bytes | None] | None:
            return database.execute(
                "SELECT kind, digest, state, result, result_sum FROM operations WHERE model_id = ? AND seq_id = ?",
                (model_id, seq_id),
            ).fetchone()

        row = await self.writer.submit(run)
        if row is None:
            return None
        kind, digest, number, result, stored_sum = row
        if result is None:
            return Record(kind, digest, EntryState(number), None)
        if stored_sum != result_sum(model_id, seq_id, number, result):
            damage = self._damaged("answer", model_id, seq_id, "its checksum does not match")
            return Record(kind, digest, EntryState(number), damage)
        try:
            if number == EntryState.FAILED:
                outcome = errors.from_bytes(result)
            else:
                outcome = carried_over(trainer_pb2.WaitResultResponse.FromString(result))
        except DecodeError as error:
            outcome = self._damaged("answer", model_id, seq_id, str(error))
        return Record(kind, digest, EntryState(number), outcome)

    # Reading for a restart

    async def live_models(self) -> list[LiveModel]:
        """All live models, in the order of their creation."""
        rows = await self.writer.submit_until_done(
            lambda database: database.execute(f"{_LIVE_MODELS} ORDER BY created_at").fetchall()
        )
        return [LiveModel(*row) for row in rows]

    async def live_model(self, model_id: str) -> LiveModel | None:
        """A live model; None when the journal has no live model of this id."""
        row = await self.writer.submit_until_done(
            lambda database: database.execute(f"{_LIVE_MODELS} AND model_id = ?", (model_id,)).fetchone()
        )
        return None if row is None else LiveModel(*row)

    async def model_ids(self) -> set[str]:
        """Ids of all models, lost and failed ones included, and those of other trainers in the same database."""
        rows = await self.writer.submit_until_done(lambda database: database.execute(database.all_model_ids).fetchall())
        return {model_id for (model_id,) in rows}

    async def history(self, model_id: str) -> list[Entry]:
        """The model's operations, in the order of seq_id."""
        rows = await self.writer.submit_until_done(
            lambda database: database.execute(
                "SELECT seq_id, kind, digest, state, coalesce(length(request), 0) FROM operations WHERE model_id = ? "
                "ORDER BY seq_id",
                (model_id,),
            ).fetchall()
        )
        return [Entry(seq_id, kind, digest, EntryState(state), size) for seq_id, kind, digest, state, size in rows]

    async def body(self, model_id: str, seq_id: int) -> Body:
        """The body of an operation that has one. Raises DataCorrupted, which names the journal, for a body that
        differs from the one that was appended."""
        row = await self.writer.submit_until_done(
            lambda database: database.execute(
                "SELECT kind, digest, request, request_sum FROM operations WHERE model_id = ? AND seq_id = ?",
                (model_id, seq_id),
            ).fetchone()
        )
        if row is None or row[2] is None:  # only where the table and its index disagree
            raise self._damaged("request", model_id, seq_id, "it is not found")
        kind, digest, request, request_sum = row
        if request_sum != sum_of(model_id, seq_id, kind, request):
            raise self._damaged("request", model_id, seq_id, "its checksum does not match")
        return Body(kind, digest, request)

    async def unpacked(self, model_id: str, seq_id: int) -> bytes:
        """The serialized request. Raises DataCorrupted as `body` does."""
        body = await self.body(model_id, seq_id)
        try:
            return await in_pool(body.unpack)
        except ValueError as error:
            raise self._damaged("request", model_id, seq_id, str(error)) from None

    def _damaged(self, what: str, model_id: str, seq_id: int, why: str) -> DataCorrupted:
        return DataCorrupted(
            f"the {what} of {model_id}, seq_id {seq_id}, in the journal {self._name} is damaged: {why}",
            model_id=model_id,
            seq_id=seq_id,
        )

    async def lose(self, model_id: str, reason: str) -> None:
        """Records that a model can never be restored. Its operations that have not run fail."""

        def run(database: Database) -> None:
            now = time.time()
            status = errors.to_bytes(lost(model_id, reason))
            (num_bytes,) = database.execute(
                "SELECT coalesce(sum(length(request)), 0) FROM operations WHERE model_id = ? AND state = 0", (model_id,)
            ).fetchone()
            waiting = database.execute(
                "SELECT seq_id FROM operations WHERE model_id = ? AND state = 0", (model_id,)
            ).fetchall()
            database.executemany(
                "UPDATE operations SET state = ?, result = ?, result_sum = ?, finished_at = ? "
                "WHERE model_id = ? AND seq_id = ?",
                [
                    (
                        EntryState.FAILED,
                        status,
                        result_sum(model_id, seq_id, EntryState.FAILED, status),
                        now,
                        model_id,
                        seq_id,
                    )
                    for (seq_id,) in waiting
                ],
            )
            database.execute(
                "UPDATE models SET state = 'lost', reason = ?, ended_at = ? WHERE model_id = ?", (reason, now, model_id)
            )
            self.bound.sizes.pending -= num_bytes
            self.bound.sizes.total += len(waiting) * len(status)

        await self.writer.submit(run)

    async def check_not_lost(self, model_id: str) -> None:
        """Raises ModelLost for a model that could not be restored."""
        row = await self.writer.submit(
            lambda database: database.execute(
                "SELECT state, reason FROM models WHERE model_id = ?", (model_id,)
            ).fetchone()
        )
        if row is not None and row[0] == "lost":
            raise lost(model_id, row[1])

    # Snapshots

    async def add_snapshot(self, model_id: str, seq_id: int, *, num_bytes: int) -> int | None:
        """Records a durable snapshot that covers the operations up to `seq_id`, and cuts bodies that the previous
        snapshot covers, too.

        Returns the previous snapshot's seq_id, -1 when there was none. Returns None and changes nothing when a covered
        operation has no answer yet, when the model has a newer snapshot, or when the model was deleted.
        """

        # The previous snapshot, as found by an earlier call of `run`, whose transaction may have taken place.
        found: list[int] = []

        def run(database: Database) -> int | None:
            row = database.execute(
                "SELECT coalesce(snapshot_seq_id, -1), cut_seq_id FROM models WHERE model_id = ?", (model_id,)
            ).fetchone()
            if row is not None and row[0] == seq_id and found:
                return found[0]
            if row is None or row[0] >= seq_id:
                return None
            before, cut = row
            unanswered = "SELECT 1 FROM operations WHERE model_id = ? AND state = 0 AND seq_id <= ? LIMIT 1"
            if database.execute(unanswered, (model_id, seq_id)).fetchone():
                return None
            if before > cut:
                self.bound.cut_up_to(database, model_id, before)
            database.execute(
                "UPDATE models SET snapshot_seq_id = ?, snapshot_at = ?, snapshot_bytes = ? WHERE model_id = ?",
                (seq_id, time.time(), num_bytes, model_id),
            )
            found[:] = [before]
            return before

        return await self.writer.submit(run)

    async def fall_back(self, model_id: str, seq_id: int | None) -> None:
        """Records that the newest intact snapshot is an older one, after `seq_id`, or that there is none (None)."""
        await self.writer.submit_until_done(
            lambda database: database.execute(
                "UPDATE models SET snapshot_seq_id = ? WHERE model_id = ?", (seq_id, model_id)
            )
        )

    async def delete_model(self, model_id: str) -> None:
        """Removes the model and its operations; an unknown one is no error."""

        await self.writer.submit(lambda database: self.bound.delete_model(database, model_id))
        del self._appended[model_id]

    async def summaries(self) -> list[Summary]:
        """Summaries of all models, for an operator."""
        return await self.writer.submit(summaries)

    async def prune(self, *, dry_run: bool) -> Pruned:
        """Deletes expired results, expired ended models, and bodies that the newest snapshot covers. Older snapshots
        can then no longer restore their models. `dry_run`: only counts what would be deleted."""

        def run(database: Database) -> Pruned:
            pruned = prune(database, expired_before=time.time() - self._result_retention_s, dry_run=dry_run)
            self.bound.sizes = Sizes.of(database)
            return pruned

        return await self.writer.submit(run)


def _waiting_bytes(database: Database, model_id: str, seq_id: int) -> int | None:
    """Size of the body of an operation that has not run, in bytes; None when there is no such operation."""
    select = "SELECT length(request) FROM operations WHERE model_id = ? AND seq_id = ? AND state = 0"
    row = database.execute(select, (model_id, seq_id)).fetchone()
    return None if row is None else row[0]


def _result(outcome: trainer_pb2.WaitResultResponse | ServiceError) -> bytes:
    return errors.to_bytes(outcome) if isinstance(outcome, ServiceError) else outcome.SerializeToString()
