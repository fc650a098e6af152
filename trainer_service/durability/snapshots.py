"""Decides when a model's snapshot is taken, has it written, and enters it into the journal.

A snapshot is captured on the compute thread right after an optimizer step, when the model has no gradients: a copy in
host memory, which another thread writes. It counts once it is durable and every operation that it covers has its answer
in the journal; then the journal is cut. The last two snapshots of each model are kept. A model that is parked gets one
more (`complete`), with its gradients if it has any.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tinsmith.errors import FailedPrecondition, ServiceError
from tinsmith.tasks import cancel_all
from tinsmith.threads import in_pool, in_pool_of
from tinsmith.v1 import types_pb2 as pb
from trainer_service.durability.executing import Executing, Name, other_work
from trainer_service.durability.journal import Journal
from trainer_service.durability.stored_snapshots import SnapshotStore
from trainer_service.engine.engine import CapturedState
from trainer_service.metrics import Metrics
from trainer_service.operation import Turn

logger = logging.getLogger(__name__)

_MOST_WAITING = 2
"""Most captured states of all models that wait to be written. Each takes the memory of a model and its moments."""


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """When a model's next snapshot is due: at its first step after one of these limits, counted from the last snapshot.

    0 means no limit.
    """

    steps: int
    seconds: float
    journal_bytes: int
    """Bytes of the model's request bodies in the journal."""


@dataclass(slots=True, eq=False)
class _Progress:
    """The snapshots of one live model."""

    taken_at: float = field(default_factory=time.monotonic)
    """Time of the last capture, or of the model's creation or restoration, by time.monotonic."""
    num_steps: int = 0
    """Steps since `taken_at`."""
    bytes_before: int = 0
    """`Journal.appended_bytes` of the model at `taken_at`."""
    num_waiting: int = 0
    """Captured states that have not been written yet."""
    newest: int = -1
    """seq_id of the newest snapshot that counts, as far as this process knows; -1 means none."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Snapshots:
    """The snapshots of all live models. `is_due` and `skip` are called on the compute thread, all else on one event
    loop."""

    def __init__(
        self, files: SnapshotStore, journal: Journal, policy: SnapshotPolicy, metrics: Metrics, executing: Executing
    ) -> None:
        self.files = files
        self._executing = executing
        self._journal = journal
        self._policy = policy
        self._metrics = metrics
        self._models: dict[str, _Progress] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self.tasks: set[asyncio.Task[Any]] = set()

    def add(self, model_id: str, *, replayed_bytes: int = 0, newest: int = -1) -> None:
        """Begins to take snapshots of a live model. `replayed_bytes`: bytes that the journal held of the model when it
        came back from its snapshot `newest`."""
        bytes_before = self._journal.appended_bytes(model_id) - replayed_bytes
        self._models[model_id] = _Progress(bytes_before=bytes_before, newest=newest)

    async def forget(self, model_id: str) -> None:
        """Deletes all snapshots of a model, also one that is being written."""
        progress = self._models.pop(model_id, None)
        async with asyncio.Lock() if progress is None else progress.writing:
            await self._on_thread(self.files.delete_all, model_id)

    def is_due(self, model_id: str) -> bool:
        """Called after each optimizer step. After True the caller captures the model, and calls `keep_later` or, if the
        capture fails, `skip`."""
        progress = self._models.get(model_id)
        if progress is None:
            return False
        progress.num_steps += 1
        if progress.num_waiting or sum(one.num_waiting for one in list(self._models.values())) >= _MOST_WAITING:
            return False
        policy = self._policy
        num_bytes = self._journal.appended_bytes(model_id) - progress.bytes_before
        is_due = (
            0 < policy.steps <= progress.num_steps
            or 0 < policy.seconds <= time.monotonic() - progress.taken_at
            or 0 < policy.journal_bytes <= num_bytes
            or (self._journal.bound.is_pressed and num_bytes > 0)
        )
        if is_due:
            self._take(model_id, progress)
        return is_due

    def skip(self, model_id: str, error: Exception) -> None:
        """Records a failed capture. The next snapshot is due as if it had succeeded. Called on the compute thread."""
        self._metrics.durability.snapshot_failures.inc()
        logger.warning("no snapshot of %s can be captured: %s", model_id, error)
        if (progress := self._models.get(model_id)) is not None:
            progress.num_waiting -= 1

    def keep_later(self, turn: Turn, seq_id: int, info: pb.CheckpointInfo, state: CapturedState) -> None:
        """Writes, in the background, the state after `seq_id` that `is_due` has asked for."""
        self._spawn(self._write(turn, seq_id, info, state))

    async def keep(self, turn: Turn, seq_id: int, info: pb.CheckpointInfo, state: CapturedState) -> None:
        """Writes a state that could not be computed again. Returns when it is durable, or the attempt has failed."""
        progress = self._models.get(info.model_id)
        if progress is not None:
            self._take(info.model_id, progress)
            await self._write(turn, seq_id, info, state)

    async def complete(
        self, model_id: str, seq_id: int, capture: Callable[[], Awaitable[tuple[pb.CheckpointInfo, CapturedState]]]
    ) -> None:
        """Returns when a snapshot after `seq_id`, the model's last operation, counts. `capture` makes one if needed.

        Called when all of the model's answers are stored. Raises OSError and ServiceError when it fails.
        """
        progress = self._models[model_id]
        async with progress.writing:
            if progress.newest == seq_id:
                return
            num_bytes = await self._store(seq_id, *await capture())
            await self._count(model_id, seq_id, progress, num_bytes)
        if progress.newest != seq_id:
            raise FailedPrecondition(f"the journal does not take the snapshot of {model_id} after seq_id {seq_id}")

    def drop(self, model_id: str) -> None:
        """Forgets a model that is no longer in memory. Its snapshots stay."""
        self._models.pop(model_id, None)

    async def close(self) -> None:
        """Ends the tasks and the thread. A snapshot that is being written is never entered into the journal."""
        await cancel_all(self.tasks)
        await in_pool(self._threads.shutdown, wait=True, cancel_futures=True)

    def _take(self, model_id: str, progress: _Progress) -> None:
        """Counts a snapshot as taken now."""
        progress.num_waiting += 1
        progress.taken_at, progress.num_steps = time.monotonic(), 0
        progress.bytes_before = self._journal.appended_bytes(model_id)

    async def _write(self, turn: Turn, seq_id: int, info: pb.CheckpointInfo, state: CapturedState) -> None:
        model_id = info.model_id
        progress = self._models.get(model_id)
        if progress is None:
            return
        try:
            async with progress.writing:
                if self._models.get(model_id) is not progress:  # deleted or parked meanwhile
                    return
                num_bytes = await self._store(seq_id, info, state)
        except (OSError, ServiceError) as error:
            self._metrics.durability.snapshot_failures.inc()
            logger.warning(
                "the snapshot %s/%d cannot be written: %s; training goes on, and a restart replays more",
                model_id,
                seq_id,
                error,
            )
            return
        finally:
            progress.num_waiting -= 1
        self._spawn(self._enter(turn, model_id, seq_id, progress, num_bytes))

    async def _store(self, seq_id: int, info: pb.CheckpointInfo, state: CapturedState) -> int:
        """Writes a snapshot. Returns its size in bytes once it is durable.

        Raises OSError, and ServiceError when the process has ended too often while it wrote snapshots of the model.
        """
        started = time.perf_counter()
        name = _work(info.model_id)
        await self._executing.turn_to_store(*name, of_model=True)
        with self._executing.storing(*name):
            num_bytes = await self._on_thread(self.files.write, seq_id, info, state)
        self._metrics.durability.snapshot_seconds.observe(time.perf_counter() - started)
        self._metrics.durability.snapshot_bytes.inc(num_bytes)
        return num_bytes

    async def _enter(self, turn: Turn, model_id: str, seq_id: int, progress: _Progress, num_bytes: int) -> None:
        """Enters a durable snapshot into the journal once all answers up to it are stored."""
        await turn.stored()
        try:
            async with progress.writing:
                await self._count(model_id, seq_id, progress, num_bytes)
        except ServiceError as error:
            logger.warning("the journal does not take the snapshot of %s after seq_id %d: %s", model_id, seq_id, error)

    async def _count(self, model_id: str, seq_id: int, progress: _Progress, num_bytes: int) -> None:
        """Enters a durable snapshot into the journal, which cuts bodies, and deletes snapshots before the previous one.

        Called with the lock `progress.writing`. Raises ServiceError.
        """
        async with self._executing.stage(*_work(model_id)):
            before = await self._journal.add_snapshot(model_id, seq_id, num_bytes=num_bytes)
        self._executing.forget(*_work(model_id))
        if before is not None and self._models.get(model_id) is progress:
            progress.newest = seq_id
            older = [one for one in await self._on_thread(self.files.seq_ids, model_id) if one < before]
            await self._on_thread(self.files.delete, model_id, older)

    async def _on_thread(self, call: Any, *arguments: Any) -> Any:
        return await in_pool_of(self._threads, call, *arguments)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def _work(model_id: str) -> Name:
    """Name of the writing of a model's snapshots, for the record of executions."""
    return other_work(f"snapshot {model_id}", b"")
