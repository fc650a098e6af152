"""Restores live models from the journal: the newest snapshot of each, and the operations after it.

After a restart, models come back that have operations which no snapshot covers. The others stay parked until a request
needs them (scheduling/parking.py). Among the first there may be more than max_models, because operations of parked
models may wait for one that has not arrived. Those stay parked, too, and come back one after the other.

A model begins with its newest intact snapshot that covers only answered operations. If there is none and the journal
goes back to the model's creation, the creation runs again. Then the scheduler gets the model's later operations:

    done      forward_backward with gradients, optim_step and load_checkpoint run again, and keep their answers; saves
              and forward_only ones do not run again
    failed    has the same effect on the model as before: a forward_backward taints the gradients, and an optim_step
              that was refused for that, or for numbers that are not finite, clears them
    accepted  runs, for the first time as far as is known. A save that had written its files finishes with them

A model that this process cannot restore (another base model, no memory) stays in the journal for the next process. A
model that no process can restore is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import (
    DataCorrupted,
    FailedPrecondition,
    InvalidRequest,
    ModelMoved,
    NotFinite,
    NotReady,
    OutOfCapacity,
    ServiceError,
)
from tinsmith.rpc.paths import version_number
from tinsmith.threads import in_pool, in_pool_of
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.durability import stopped
from trainer_service.durability.executing import Name, other_work
from trainer_service.durability.journal import Journal
from trainer_service.durability.records import Entry, EntryState, LiveModel, lost
from trainer_service.durability.run_file import Move
from trainer_service.durability.snapshot_files import SnapshotFiles
from trainer_service.durability.snapshots import Snapshots
from trainer_service.engine.batch import Batch
from trainer_service.engine.engine import CapturedState
from trainer_service.metrics import Metrics
from trainer_service.older_forms import carried_over
from trainer_service.operation import Answer, Turn, Work
from trainer_service.operations.models import Model
from trainer_service.operations.operations import Operations, Request, parsed, refused
from trainer_service.requests import params_of
from trainer_service.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


def check_journal(journal: Path, snapshots: Path) -> None:
    """Raises SystemExit, which says what to do, when there are snapshots but no journal.

    Called before a new journal is created, because snapshots of models that are not in the journal are deleted.
    """
    if journal.exists() and journal.stat().st_size:
        return
    if others := SnapshotFiles(snapshots).model_ids():  # without a journal, no other trainer uses these files
        names = ", ".join([*others[:3], *(["..."] if len(others) > 3 else [])])
        raise SystemExit(
            f"there is no journal {journal}, and {snapshots} has snapshots of {len(others)} models ({names}): it was "
            "lost or moved, and snapshots alone do not tell what had been accepted after them. Put the journal back, "
            f"with all journal.sqlite-* beside it, or remove {snapshots} to start without these models"
        )


def check_no_file(journal: Path) -> None:
    """Raises SystemExit when the journal is to be in PostgreSQL and this file has live runs, which would not come
    back."""
    if journal.exists() and (count := stopped.num_live_runs(journal)):
        raise SystemExit(
            f"TRAINER_JOURNAL is set, and the journal {journal} has {count} live runs, which stay there. Let them end "
            "without TRAINER_JOURNAL first, or remove that file and the snapshots beside it to start without these runs"
        )


class _Lost(Exception):
    """The model can never be restored; the text says why."""


@dataclass(frozen=True, slots=True)
class Restorer:
    """Restores models after a restart, and parks and unparks them: the Shelf of scheduling/parking.py."""

    journal: Journal
    snapshots: Snapshots
    operations: Operations
    scheduler: Scheduler
    metrics: Metrics

    async def run(self) -> None:
        """Hands every live model to the scheduler, parked or to be restored. The scheduler then runs its operations."""
        self.scheduler.parking.shelf = self
        for model_id, move in (await self.journal.moved.all()).items():
            self.scheduler.models.moved[model_id] = moved(model_id, move)
        models = await self.journal.live_models()
        self.scheduler.executing.keep_models({model.model_id for model in models})
        await self._delete_orphans()
        waiting: list[LiveModel] = []
        for model in models:
            if model.is_covered:
                self.scheduler.models.parked.add(model.model_id)
            elif await self._is_replayed(model):
                await self._try_to_restore(model, unparks=False)
            else:
                waiting.append(model)
        while waiting and not self.scheduler.models.is_full:
            await self._try_to_restore(waiting.pop(), unparks=False)
        if waiting:
            self.scheduler.models.parked.update(model.model_id for model in waiting)
            self.scheduler.parking.begin_to_have(*[model.model_id for model in waiting])

    async def _is_replayed(self, model: LiveModel) -> bool:
        """True when operations that have run must run again to restore the model."""
        if model.snapshot_seq_id is None:
            return True
        history = await self.journal.history(model.model_id)
        return any(entry.state != EntryState.ACCEPTED for entry in history if entry.seq_id > model.snapshot_seq_id)

    async def _delete_orphans(self) -> None:
        """Deletes snapshots of models that the journal does not have. It is read after the snapshots, because other
        trainers, whose models begin in the journal, may have snapshots in the same place."""
        files = self.snapshots.files
        found = await in_pool(files.model_ids)
        for model_id in set(found) - await self.journal.model_ids():
            await in_pool(files.delete_all, model_id)

    async def put_away(self, model_id: str, seq_id: int) -> None:
        """See Shelf.put_away."""
        engine, model = self.operations.engine, self.operations.models.get(model_id)
        name = other_work(f"park {model_id}", b"")
        self.scheduler.executing.check(*name)

        async def capture() -> tuple[types_pb2.CheckpointInfo, CapturedState]:
            state = await self.scheduler.compute.run_alone(
                lambda: engine.capture(model_id, with_optimizer=True, with_accumulation=True), name=name
            )
            return model.snapshot_info(seq_id, state), state

        await self.snapshots.complete(model_id, seq_id, capture)
        await self._forget(model_id, name=name)
        self.scheduler.executing.forget(*name)

    async def free(self, model_id: str) -> None:
        """Frees a model's memory, if it has any. What is on disk stays."""
        await self._forget(model_id, name=other_work(f"park {model_id}", b""))

    async def bring_back(self, model_id: str) -> None:
        """See Shelf.bring_back."""
        model = await self.journal.live_model(model_id)
        if model is not None:
            await self._try_to_restore(model, unparks=True)
            if model.is_covered:
                await self.scheduler.replay.restored(model_id)
            else:  # it was adopted with operations that have not run: new ones queue behind them at once
                await self.scheduler.replay.in_memory(model_id)

    async def _try_to_restore(self, model: LiveModel, *, unparks: bool) -> None:
        try:
            await self._restore(model, unparks=unparks)
        except _Lost as error:
            logger.error("%s is lost: %s", model.model_id, error)
            await self.journal.lose(model.model_id, str(error))
            self.scheduler.models.fail_waiting(model.model_id, lost(model.model_id, str(error)))
            self.metrics.durability.unrestored_models.inc()
        except ServiceError as error:
            if unparks and isinstance(error, OutOfCapacity | NotReady):  # for example, the journal's disk is full
                raise
            self.scheduler.replay.give_up(model.model_id, str(error))

    async def _forget(self, model_id: str, *, name: Name) -> None:
        """Frees a model's memory. `name`: that of the work, for the record of executions."""
        self.operations.models.drop(model_id)
        self.snapshots.drop(model_id)
        await self.scheduler.compute.run_alone(lambda: self.operations.engine.delete_model(model_id), name=name)

    async def _restore(self, model: LiveModel, *, unparks: bool) -> None:
        model_id = model.model_id
        executing, reading = self.scheduler.executing, other_work(f"restore {model_id}", b"")
        await executing.turn_to_store(*reading, of_model=True)
        with executing.storing(*reading):
            history = await self.journal.history(model_id)
            info = await self._newest_snapshot(model, history)
        executing.forget(*reading)
        if info is None:
            start, found, base_model = 0, *await self._creation(model, history)
        else:
            start, base_model = _seq_id(info), info.base_model
            self._check(model_id, start)  # its operation's row may be gone
            found = self._from_snapshot(info, history)
            self.operations.models.check_base_weights(info.base_weights, field="base_weights")
        self.operations.models.check_base_model(base_model, field="base_model")
        for entry in history:
            if entry.seq_id >= start and entry.state == EntryState.DONE:
                self._check(model_id, entry.seq_id)
        following = [entry for entry in history if entry.seq_id > start]
        logger.info("restoring %s: from seq_id %d, and %d operations after it", model_id, start, len(following))

        async def work_of(entry: Entry) -> Work:
            try:
                return await self._work_of(model_id, entry)
            except DataCorrupted as error:  # a damaged request: the operations after it can never be computed
                await self.journal.lose(model_id, str(error))
                raise

        self.scheduler.replay.begin(
            model_id,
            history,
            start=start,
            found=found,
            work_of=work_of,
            checked=lambda entry, work: self._checked(model_id, entry, work),
            forget=lambda: self._forget(model_id, name=reading),
            unparks=unparks,
        )

    def _check(self, model_id: str, seq_id: int) -> None:
        """Raises ServiceError when an operation without which the model is lost has ended the process too often."""
        self.scheduler.executing.check(model_id, seq_id, of_model=True)
        self.scheduler.executing.check_storing(model_id, seq_id, of_model=True)

    async def _newest_snapshot(self, model: LiveModel, history: Sequence[Entry]) -> types_pb2.CheckpointInfo | None:
        """The newest intact snapshot that the model can begin with; None means its creation.

        Deletes later snapshots, which the operations to come will replace. Raises _Lost when the journal does not go
        back to the creation and no snapshot is usable.
        """
        model_id, files = model.model_id, self.snapshots.files
        unanswered = min((entry.seq_id for entry in history if entry.state == EntryState.ACCEPTED), default=None)
        # A disk that does not keep synced data may lose the journal's end in a power cut. Then the journal decides, and
        # snapshots after its end are not used.
        known_to = max([model.cut_seq_id, -1 if model.snapshot_seq_id is None else model.snapshot_seq_id])
        known_to = max(known_to, history[-1].seq_id if history else -1)
        later: list[int] = []
        found, damage = None, ""
        for seq_id in await in_pool(files.seq_ids, model_id):
            answered = seq_id <= known_to and (unanswered is None or seq_id < unanswered)
            if seq_id >= model.cut_seq_id and answered:
                try:
                    found = await in_pool(files.verify, model_id, seq_id)
                    break
                except DataCorrupted as error:
                    logger.error("the snapshot %s/%d is not used: %s", model_id, seq_id, error)
                    damage = damage or f"; {error}"
            later.append(seq_id)
        if found is None and model.cut_seq_id >= 0:
            raise _Lost(
                f"the journal begins after seq_id {model.cut_seq_id}, and no snapshot from there on is intact{damage}"
            )
        seq_id = None if found is None else _seq_id(found)
        if seq_id != model.snapshot_seq_id:
            await self.journal.fall_back(model_id, seq_id)
        await in_pool(files.delete, model_id, [one for one in later if seq_id is None or one > seq_id])
        return found

    def _from_snapshot(self, info: types_pb2.CheckpointInfo, history: Sequence[Entry]) -> Work:
        model_id, seq_id = info.model_id, _seq_id(info)
        engine = self.operations.engine

        async def found(turn: Turn) -> Answer:
            async with turn.storing():
                info, state = await in_pool(self.snapshots.files.read, model_id, seq_id, engine.base)
            weights = self.operations.models.weights_of(state.config)
            model = Model.of_snapshot(info, state, base_weights=weights)
            engine.check_trainable(model.config.rank, model.optimizer)
            await self.scheduler.parking.make_room(lambda: engine.has_room_for(model.config))

            def make() -> None:
                engine.create_model(model_id, model.config, model.optimizer)
                engine.restore(model_id, state, with_optimizer=state.optimizer is not None)

            await turn.run(make)
            self._begin(model, history, after=seq_id)
            return Answer()

        return found

    async def _creation(self, model: LiveModel, history: Sequence[Entry]) -> tuple[Work, str]:
        """The work that makes the model again, and the base model that it asks for. Raises _Lost."""
        if not history or history[0].seq_id != 0 or not history[0].num_bytes:
            raise _Lost("its creation is not in the journal")
        try:
            request = carried_over(pb.CreateModelRequest.FromString(await self.journal.unpacked(model.model_id, 0)))
        except DataCorrupted as error:
            raise _Lost(str(error)) from None
        done = history[0].state == EntryState.DONE
        if done and request.lora_config.rank and not request.lora_config.HasField("seed"):
            raise _Lost("it was created by an earlier version, which did not record the seed of its weights")
        work = self.operations.create_model(request)
        if not done:
            try:
                self.scheduler.executing.check(model.model_id, 0)
            except ServiceError as error:
                work = refused(error)
        else:
            work = self._loads_again(model.model_id, history[0], work)
        return work, request.base_model or self.operations.models.base_models[0]

    def _begin(self, model: Model, history: Sequence[Entry], *, after: int) -> None:
        self.operations.models.add(model)
        num_bytes = sum(entry.num_bytes for entry in history if entry.seq_id > after)
        self.snapshots.add(model.model_id, replayed_bytes=num_bytes, newest=after)

    async def _work_of(self, model_id: str, entry: Entry) -> Work:
        if entry.state != EntryState.ACCEPTED and not entry.num_bytes:  # the operation did not change the model
            return _nothing
        executing = self.scheduler.executing
        reading = (
            f"replay {model_id}",
            entry.seq_id,
        )  # deaths in reading count apart, so that an operation that must not run again can still be read
        try:
            executing.check(*reading, of_model=entry.state != EntryState.ACCEPTED)
        except ServiceError as error:
            if entry.state != EntryState.ACCEPTED:
                raise
            return self.operations.refuse_unread(model_id, entry.seq_id, entry.kind, error)
        async with executing.stage(*reading):
            request = await self._read(model_id, entry)
        executing.forget(*reading)
        match entry.state:
            case EntryState.ACCEPTED:
                try:
                    executing.check(model_id, entry.seq_id)
                except ServiceError as error:
                    return self.operations.refuse(request, error)
                return await self._work(model_id, entry, request)
            case EntryState.FAILED:
                return await self._failed_again(model_id, entry, request)
            case EntryState.DONE if entry.kind == "load_checkpoint":
                return self._loads_again(model_id, entry, await self._work(model_id, entry, request))
            case EntryState.DONE:
                return await self._work(model_id, entry, request)

    async def _read(self, model_id: str, entry: Entry) -> Request:
        data = await self.journal.unpacked(model_id, entry.seq_id)
        return await in_pool(parsed, entry.kind, data)

    async def _work(self, model_id: str, entry: Entry, request: Request) -> Work:
        async with self.scheduler.executing.stage(model_id, entry.seq_id):
            return await in_pool(lambda: self.operations.work_of(request, again=True))

    async def _checked(self, model_id: str, entry: Entry, work: Work) -> Work:
        """Checks a custom loss of an operation without an answer. One with an answer was checked before, and has
        run."""
        if entry.state != EntryState.ACCEPTED or not isinstance(work, Batch):
            return work
        async with self.scheduler.executing.stage(model_id, entry.seq_id):
            return await in_pool_of(self.operations.loss_checks, self.operations.with_loss_checked, work)

    def _loads_again(self, model_id: str, entry: Entry, work: Work) -> Work:
        """Makes `work`, which reads a checkpoint, fail if it now reads another one than before."""
        assert not isinstance(work, Batch)

        async def load(turn: Turn) -> Answer:
            answer = await work(turn)
            record = await self.journal.find(model_id, entry.seq_id)
            before = record.outcome if record is not None else None
            if isinstance(before, ServiceError):  # the stored answer is damaged, so it is unknown what was loaded
                raise before
            if isinstance(before, Answer) and _source(before) != _source(answer):
                raise FailedPrecondition(f"{_source(before)} was loaded, and {_source(answer)} is there now")
            return answer

        return load

    async def _failed_again(self, model_id: str, entry: Entry, request: Request) -> Work:
        """Work with the effect that a failed operation had on the model, if any."""
        engine = self.operations.engine
        record = await self.journal.find(model_id, entry.seq_id)
        outcome = None if record is None else record.outcome
        why = "a forward_backward failed" if outcome is None else str(outcome)

        def taint() -> None:
            engine.taint(model_id, why, seq_id=entry.seq_id)

        def clear() -> None:
            if isinstance(outcome, NotFinite):
                engine.taint(model_id, why, seq_id=entry.seq_id)
            if engine.is_tainted(model_id):  # this step clears the gradients and fails, as it did before
                try:
                    engine.optim_step(model_id, params)
                except (FailedPrecondition, InvalidRequest):
                    return

        match request:
            case pb.ForwardBackwardRequest(forward_only=False) | pb.SkipOperationRequest(gradients_missing=True):
                return _runs(taint)
            case pb.OptimStepRequest():
                try:
                    params = params_of(request)
                except InvalidRequest:
                    return _nothing
                return _runs(clear)
            case _:
                return _nothing


def moved(model_id: str, move: Move) -> ModelMoved:
    """The error of all calls for a model that was released, or is being released."""
    return ModelMoved(
        f"{model_id} moves to the trainer {move.trainer_id}; send it again",
        model_id=model_id,
        trainer_id=move.trainer_id,
        move_id=move.move_id,
    )


async def _nothing(turn: Turn) -> Answer:
    return Answer()


def _runs(call: Callable[[], None]) -> Work:
    async def work(turn: Turn) -> Answer:
        await turn.run(call)
        return Answer()

    return work


def _seq_id(snapshot: types_pb2.CheckpointInfo) -> int:
    """seq_id of the last operation that the snapshot covers."""
    return version_number(snapshot.version_id, run_id=snapshot.model_id, field="version_id")


def _source(answer: Answer) -> str:
    """Identifies, for comparison and messages, the checkpoint that an operation has loaded."""
    if answer.HasField("create_model"):
        return f"a checkpoint of step {answer.create_model.model.step}"
    checkpoint = answer.load_checkpoint.checkpoint
    return f"{checkpoint.version_id} of {checkpoint.created_at.ToJsonString()}"
