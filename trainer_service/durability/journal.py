"""The journal: every accepted operation of the trainer, in order, with its answer, durable at every commit.

It is a SQLite file (journal_file.py, which describes the tables), or lies in PostgreSQL (journal_postgres.py). A second
trainer on the same file is refused. In PostgreSQL it is refused while the first one is alive, and otherwise takes over:
the first one, should it still be there, can do nothing more. One thread owns the connection (journal_writer.py), and a
write returns only when its transaction is on disk.

A request's body is cut once two snapshots of its model cover it, so that a damaged snapshot loses nothing. When the
journal exceeds max_bytes, one snapshot is enough (Bound). If even that does not suffice, as in a very long
batch, bodies are cut that a replay would need. The model can then not be restored until its next snapshot.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import xxhash
import zstandard
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tinsmith.errors import (
    DataCorrupted,
    FailedPrecondition,
    ModelLost,
    ModelNotFound,
    NotReady,
    OutOfCapacity,
    ServiceError,
)
from tinsmith.rpc import errors, tracing
from tinsmith.threads import in_pool
from tinsmith.v1 import trainer_pb2
from trainer_service.durability import journal_file, run_file
from trainer_service.durability.journal_database import Database, Superseded
from trainer_service.durability.journal_pruning import Pruned, Sizes, Summary, prune, summaries
from trainer_service.durability.journal_writer import Bound, Writer
from trainer_service.durability.run_file import Move
from trainer_service.metrics import Metrics
from trainer_service.older_forms import carried_over

_LIVE_MODELS = (
    "SELECT model_id, cut_seq_id, snapshot_seq_id, "
    "(SELECT max(seq_id) FROM operations WHERE operations.model_id = models.model_id) FROM models WHERE state = 'live'"
)
_DATUMS_AT_ONCE = 64
"""Datums of a batch that are serialized in one go."""
_READ_AGAIN_S = 1.0
"""Pause between two attempts to read what a restart needs, in seconds."""

T = TypeVar("T")


class EntryState(IntEnum):
    ACCEPTED = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Body:
    """A request as the journal stores it."""

    kind: str
    digest: bytes
    compressed: bytes

    @classmethod
    def pack(cls, kind: str, request: Message) -> Body:
        data = _serialized(request)
        return cls(kind, _digest(kind, data), zstandard.ZstdCompressor(level=1).compress(data))

    @property
    def num_bytes(self) -> int:
        """Size of the serialized request, uncompressed."""
        return zstandard.frame_content_size(self.compressed)

    def unpack(self) -> bytes:
        """The serialized request. Raises ValueError when it differs from the request that was packed."""
        try:
            data = zstandard.ZstdDecompressor().decompress(self.compressed, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
        # The trainer adds fields to these requests, such as a seed. Their digest is that of the request as it came.
        if (
            self.kind not in ("create_model", "optim_step", "save_checkpoint")
            and _digest(self.kind, data) != self.digest
        ):
            raise ValueError("its digest does not match")
        return data


@dataclass(frozen=True, slots=True)
class Record:
    """An accepted operation."""

    kind: str
    digest: bytes
    state: EntryState
    outcome: trainer_pb2.WaitResultResponse | ServiceError | None
    """The answer. None before the operation has finished, and when the answer was not kept; DataCorrupted when it is
    damaged."""


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A live model, as a restart finds it."""

    model_id: str
    cut_seq_id: int
    snapshot_seq_id: int | None
    last_seq_id: int | None
    """seq_id of the newest operation; None when no operation's row is left."""

    @property
    def is_covered(self) -> bool:
        """True when the newest snapshot covers every operation, so that nothing has to run again."""
        return self.snapshot_seq_id is not None and (self.last_seq_id or 0) <= self.snapshot_seq_id


@dataclass(frozen=True, slots=True)
class Entry:
    """An operation in its model's history."""

    seq_id: int
    kind: str
    digest: bytes
    state: EntryState
    num_bytes: int
    """Size of the compressed body, in bytes; 0 when the body was cut."""


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
        self._bound = Bound(Sizes.of(database), max_bytes=max_bytes, result_retention_s=result_retention_s)
        self._appended: Counter[str] = Counter()
        self.writer = Writer(database, self._bound, metrics)

    def close(self) -> None:
        self.writer.close()

    async def check_ours(self) -> None:
        """Raises Superseded when another trainer has taken over the journal, and NotReady when this cannot be known."""
        if self.shared_id:
            await self.writer.submit(lambda _: None)

    def appended_bytes(self, model_id: str) -> int:
        """Bytes of the bodies that this process has appended for a model. May be called on any thread."""
        return self._appended[model_id]

    @property
    def is_pressed(self) -> bool:
        """True when the journal is more than half full, so that snapshots should be taken, which let bodies be cut.

        May be called on any thread.
        """
        return self._bound.is_pressed

    async def append(self, model_id: str, seq_id: int, body: Body, *, within_share: bool = False) -> None:
        """Adds an operation, and returns when it is on disk. Operation 0 also adds the model.

        The caller makes sure that the operation is new. Raises OutOfCapacity when the disk or the journal is full, and
        ModelNotFound when the model was deleted. `within_share`: raises OutOfCapacity also when the model's operations
        that have not run would take more bytes than the journal has left for others, by the rule of `HeldBytes`.
        """

        num_bytes = len(body.compressed)

        def run(database: Database) -> None:
            pending, max_bytes = self._bound.sizes.pending, self._bound.max_bytes
            if pending + num_bytes > max_bytes:
                raise OutOfCapacity(
                    f"the journal holds {pending} bytes of operations that have not run; "
                    f"{num_bytes} more are above journal_max_bytes {max_bytes}"
                )
            if within_share and 2 * (pending + num_bytes) > max_bytes:  # below that, no model can be above its share
                own = Sizes.of(database, model_id=model_id).pending
                if own + num_bytes > max_bytes - pending - num_bytes:
                    raise OutOfCapacity(
                        f"{model_id}: its operations that have not run take {own} bytes of the journal and this one "
                        f"takes {num_bytes}, which is more than its share of this server's journal_max_bytes "
                        f"{max_bytes}: those of all models take {pending}"
                    )
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
                # An earlier attempt was written, but an outage kept its outcome from us, so nobody was told of it. This
                # one is told, so it is the one that stays.
                waiting = _waiting_bytes(database, model_id, seq_id)
                if waiting is None:
                    raise ServiceError(f"{model_id}, seq_id {seq_id}, is in the journal already", model_id=model_id)
                replaced_bytes = waiting
                database.execute(
                    "UPDATE operations SET kind = ?, digest = ?, request = ?, accepted_at = ?, request_sum = ? "
                    "WHERE model_id = ? AND seq_id = ?",
                    row,
                )
            self._bound.sizes.total += num_bytes - replaced_bytes
            self._bound.sizes.pending += num_bytes - replaced_bytes

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
            self._bound.sizes.pending -= row[0]
            self._bound.sizes.total += len(result or b"")
            if not keep_body:
                self._bound.sizes.total -= row[0]
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

    # What a restart reads

    async def _read(self, run: Callable[[Database], T]) -> T:
        """As Writer.submit, but waits for the end of an outage however long it is: a model that could not be read would
        count as lost."""
        while True:
            try:
                return await self.writer.submit(run)
            except Superseded:
                raise
            except NotReady:
                if self.writer.is_closed:
                    raise
            await asyncio.sleep(_READ_AGAIN_S)

    async def live_models(self) -> list[LiveModel]:
        """All live models, in the order of their creation."""
        rows = await self._read(lambda database: database.execute(f"{_LIVE_MODELS} ORDER BY created_at").fetchall())
        return [LiveModel(*row) for row in rows]

    async def live_model(self, model_id: str) -> LiveModel | None:
        """A live model; None when the journal has no live model of this id."""
        row = await self._read(
            lambda database: database.execute(f"{_LIVE_MODELS} AND model_id = ?", (model_id,)).fetchone()
        )
        return None if row is None else LiveModel(*row)

    async def model_ids(self) -> set[str]:
        """Ids of all models, lost and failed ones included, and those of other trainers in the same database."""
        rows = await self._read(lambda database: database.execute(database.all_model_ids).fetchall())
        return {model_id for (model_id,) in rows}

    async def history(self, model_id: str) -> list[Entry]:
        """The model's operations, in the order of seq_id."""
        rows = await self._read(
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
        row = await self._read(
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
            self._bound.sizes.pending -= num_bytes
            self._bound.sizes.total += len(waiting) * len(status)

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

        found: list[
            int
        ] = []  # the previous snapshot, by an earlier call of `run` whose transaction may have taken place

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
                self._bound.cut_up_to(database, model_id, before)
            database.execute(
                "UPDATE models SET snapshot_seq_id = ?, snapshot_at = ?, snapshot_bytes = ? WHERE model_id = ?",
                (seq_id, time.time(), num_bytes, model_id),
            )
            found[:] = [before]
            return before

        return await self.writer.submit(run)

    async def fall_back(self, model_id: str, seq_id: int | None) -> None:
        """Records that the newest intact snapshot is an older one, after `seq_id`, or that there is none (None)."""
        await self._read(
            lambda database: database.execute(
                "UPDATE models SET snapshot_seq_id = ? WHERE model_id = ?", (seq_id, model_id)
            )
        )

    async def delete_model(self, model_id: str) -> None:
        """Removes the model and its operations; an unknown one is no error."""

        def run(database: Database) -> None:
            gone = Sizes.of(database, model_id=model_id)
            database.execute("DELETE FROM models WHERE model_id = ?", (model_id,))
            self._bound.sizes.total -= gone.total
            self._bound.sizes.pending -= gone.pending

        await self.writer.submit(run)
        del self._appended[model_id]

    # Models that move to another trainer

    async def moved_models(self) -> dict[str, Move]:
        """The models that were released, by model_id."""
        rows = await self._read(
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

        model, sizes = await self._read(look)
        if model is None or model[1] is None:
            raise FailedPrecondition(f"the journal has no snapshot of {model_id!r}", model_id=model_id)
        created_at, covered = model
        await in_pool(run_file.create, path, model_id, move, created_at=created_at, snapshot_seq_id=covered)
        for first, last in _ranges(sizes):
            values = covered, model_id, first, last
            rows = await self._read(
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

        pause_s = _READ_AGAIN_S
        while True:
            try:
                return await self.writer.submit(run)
            except Superseded:
                raise
            except (NotReady, OutOfCapacity):
                if self.writer.is_closed:
                    raise
            await asyncio.sleep(pause_s)

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
            added = Sizes.of(database, model_id=model_id)
            self._bound.sizes.total += added.total
            self._bound.sizes.pending += added.pending

        await in_pool(run_file.check, path)
        await self.writer.submit(run)

    async def forget_moved(self, model_id: str, move_id: str) -> bool:
        """Deletes what is left of a model that was released in this move. False when there is nothing."""

        def run(database: Database) -> bool:
            row = database.execute("SELECT state, reason FROM models WHERE model_id = ?", (model_id,)).fetchone()
            if row is None or row[0] != "moved" or Move.parse(row[1]).move_id != move_id:
                return False
            gone = Sizes.of(database, model_id=model_id)
            database.execute("DELETE FROM models WHERE model_id = ?", (model_id,))
            self._bound.sizes.total -= gone.total
            self._bound.sizes.pending -= gone.pending
            return True

        return await self.writer.submit(run)

    async def summaries(self) -> list[Summary]:
        """Summaries of all models, for an operator."""
        return await self.writer.submit(summaries)

    async def prune(self, *, dry_run: bool) -> Pruned:
        """Deletes expired results, expired ended models, and bodies that the newest snapshot covers. Older snapshots
        can then no longer restore their models. `dry_run`: only counts what would be deleted."""

        def run(database: Database) -> Pruned:
            pruned = prune(database, expired_before=time.time() - self._result_retention_s, dry_run=dry_run)
            self._bound.sizes = Sizes.of(database)
            return pruned

        return await self.writer.submit(run)


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


def _waiting_bytes(database: Database, model_id: str, seq_id: int) -> int | None:
    """Size of the body of an operation that has not run, in bytes; None when there is no such operation."""
    select = "SELECT length(request) FROM operations WHERE model_id = ? AND seq_id = ? AND state = 0"
    row = database.execute(select, (model_id, seq_id)).fetchone()
    return None if row is None else row[0]


def _serialized(request: Message) -> bytes:
    """The deterministic serialization of a request. Many datums are serialized a few at a time, because protobuf holds
    the interpreter's lock while it serializes a message, and the event loop and the compute thread wait for that."""
    if not isinstance(request, trainer_pb2.ForwardBackwardRequest) or len(UnknownFieldSet(request)):
        return request.SerializeToString(deterministic=True)
    starts = range(0, len(request.data), _DATUMS_AT_ONCE)
    after = trainer_pb2.ForwardBackwardRequest(
        loss_fn=request.loss_fn,
        loss_fn_config=request.loss_fn_config,
        forward_only=request.forward_only,
        loss_fn_config_v2=request.loss_fn_config_v2,
        custom_loss=request.custom_loss if request.HasField("custom_loss") else None,
    )
    parts = chain(
        [trainer_pb2.ForwardBackwardRequest(model_id=request.model_id, seq_id=request.seq_id)],
        (trainer_pb2.ForwardBackwardRequest(data=request.data[start : start + _DATUMS_AT_ONCE]) for start in starts),
        [after],
    )
    return b"".join(part.SerializeToString(deterministic=True) for part in parts)


def _result(outcome: trainer_pb2.WaitResultResponse | ServiceError) -> bytes:
    return errors.to_bytes(outcome) if isinstance(outcome, ServiceError) else outcome.SerializeToString()


def _digest(kind: str, data: bytes) -> bytes:
    digest = xxhash.xxh3_128(kind.encode() + b"\0")
    digest.update(data)
    return digest.digest()


def sum_of(model_id: str, seq_id: int, what: str, data: bytes) -> bytes:
    """Checksum of a request or a result, bound to its place. `what`: a request's kind, or the number of a result's
    state."""
    digest = xxhash.xxh3_64(f"{model_id}\0{seq_id}\0{what}\0".encode())
    digest.update(data)
    return digest.digest()


def result_sum(model_id: str, seq_id: int, state: int, result: bytes) -> bytes:
    """The checksum of an answer."""
    return sum_of(model_id, seq_id, str(int(state)), result)


def lost(model_id: str, reason: str) -> ModelLost:
    """The error of all operations of a model that could not be restored."""
    return ModelLost(
        f"{model_id} was not restored after the trainer's restart: {reason}; resume from a checkpoint "
        "(create_training_client_from_state)",
        model_id=model_id,
    )
