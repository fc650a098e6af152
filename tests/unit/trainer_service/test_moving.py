"""A model moves from one trainer to another: the same weights, bit for bit, and the same answers, whatever dies on the
way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from tests.support.waiting import until
from tests.unit.trainer_service.journals import Journals
from tests.unit.trainer_service.restoring import Process
from tests.unit.trainer_service.test_restore import (
    MODEL,
    SCRIPT,
    assert_equal,
    batch,
    creation,
    outcomes,
    run,
    save,
    step,
)
from tinsmith.errors import (
    DataCorrupted,
    FailedPrecondition,
    InvalidRequest,
    ModelMoved,
    ModelNotFound,
    NotReady,
    OutOfCapacity,
    ServiceError,
)
from tinsmith.modeling.base_model import BaseModel
from trainer_service.durability import run_file
from trainer_service.durability.journal import Journal
from trainer_service.durability.moved_models import MovedModels
from trainer_service.durability.packages import ROWS, Packages
from trainer_service.durability.run_file import Move
from trainer_service.durability.snapshots import SnapshotPolicy
from trainer_service.operation import Answer
from trainer_service.operations import moving
from trainer_service.operations.restore import Restorer
from trainer_service.scheduling.model_queue import ModelQueues

MOVE = Move("a" * 32, "target")
BACK = Move("b" * 32, "source")


class Killed(BaseException):
    """Ends a step of a move where it is raised, as the end of the process would."""


@dataclass
class Trainers:
    """Trainers with one store of checkpoints, by name. Each has a journal of its own, or its part of one database."""

    folder: Path
    base: BaseModel
    journals: Journals
    settings: dict[str, Any]
    running: dict[str, Process]
    leases: dict[str, float] = field(default_factory=dict)
    """Settings of the database of each trainer: lease_s and renew_s."""

    async def start(self, name: str) -> Process:
        """Starts a trainer; called again, it starts its next process."""
        if name in self.running:
            await self.running.pop(name).stop()
        database = None
        if self.journals.url:
            database = await asyncio.to_thread(self.journals.database, trainer=name, **self.leases)
        self.running[name] = await Process.start(
            self.folder / name,
            self.base,
            store=self.folder / "store",
            trainer_id=name,
            database=database,
            **self.settings,
        )
        return self.running[name]


IN_BOTH = pytest.mark.parametrize("form", ["sqlite", "postgres"])
IN_BOTH_OF_THE_SLOW = pytest.mark.parametrize("form", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])


@pytest.fixture
def form() -> str:
    return "sqlite"


@pytest.fixture
async def trainers(
    request: pytest.FixtureRequest, base: BaseModel, tmp_path: Path, form: str
) -> AsyncIterator[Trainers]:
    journals = Journals(tmp_path, "") if form == "sqlite" else request.getfixturevalue("in_postgres")
    made = Trainers(tmp_path, base, journals, {}, {})
    yield made
    for process in made.running.values():
        await process.stop()


@pytest.fixture
async def alone(base: BaseModel, tmp_path: Path) -> AsyncIterator[Process]:
    """A trainer at which a run is undisturbed."""
    process = await Process.start(tmp_path / "alone", base)
    yield process
    await process.stop()


@dataclass(frozen=True)
class Undisturbed:
    """Answers and weights of the whole script where nothing moves and nobody dies."""

    outcomes: list[Any]
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def undisturbed(base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    async def train() -> Undisturbed:
        process = await Process.start(tmp_path_factory.mktemp("undisturbed"), base)
        await run(process)
        found = Undisturbed(await outcomes(process), await process.weights(MODEL))
        await process.stop()
        return found

    with ThreadPoolExecutor(1) as thread:  # the event loop of the test is not this one's
        return thread.submit(asyncio.run, train()).result()


async def assert_alike(process: Process, undisturbed: Undisturbed) -> None:
    """Asserts that the process has the same answers and, bit for bit, the same weights and moments."""
    for seq_id, (one, other) in enumerate(zip(await outcomes(process), undisturbed.outcomes, strict=True)):
        assert one == other, seq_id
    assert_equal(await process.weights(MODEL), undisturbed.weights)


async def has(process: Process) -> bool:
    """Whether the trainer's journal has the model as its own."""
    return await process.journal.live_model(MODEL) is not None


async def move(source: Process, target: Process, step: Move = MOVE) -> None:
    await source.moving.release(MODEL, step)
    await target.moving.adopt(MODEL, step.move_id)
    for process in (source, target):
        await process.moving.forget(MODEL, step.move_id)


async def answered(process: Process) -> None:
    """Waits until every accepted operation of the model has its answer."""

    await process.scheduler.check_held(MODEL)
    for entry in await process.journal.history(MODEL):
        await process.outcome(MODEL, entry.seq_id)
    await asyncio.gather(*process.scheduler.tasks)


@IN_BOTH
async def test_a_model_that_moves_after_each_operation_changes_no_bit_and_no_answer(
    trainers: Trainers, undisturbed: Undisturbed
) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    for one in SCRIPT:
        await run(source, [one])
        await move(source, target, Move("a" * 32, "target" if target is trainers.running["target"] else "source"))
        assert (await has(source), await has(target)) == (False, True)
        source, target = target, source
    await assert_alike(source, undisturbed)
    assert source.count("replayed_operations_total", kind="forward_backward") == 0
    if not trainers.journals.url:  # otherwise both have their snapshots in one place
        assert not target.snapshots.files.seq_ids(MODEL)


@pytest.mark.parametrize("num_done", [0, 8, 20])
async def test_a_pipeline_that_moves_while_it_runs_goes_on_at_the_other_trainer(
    trainers: Trainers, undisturbed: Undisturbed, num_done: int
) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    sent = [await source.send(one) for one in SCRIPT]
    await asyncio.wait([sent[num_done].outcome])
    await source.moving.release(MODEL, MOVE)
    assert all(one.outcome.done() for one in sent)
    assert not source.engine.models
    await target.moving.adopt(MODEL, MOVE.move_id)
    await answered(target)
    await assert_alike(target, undisturbed)


@IN_BOTH
async def test_every_call_for_a_released_model_is_told_to_come_again_also_after_a_restart(trainers: Trainers) -> None:
    source = await trainers.start("source")
    await run(source, [creation(), batch(1)])
    await source.send(step(3))  # 2 has not arrived
    waiting = asyncio.create_task((await source.scheduler.find(MODEL, 3)).wait())
    await source.moving.release(MODEL, MOVE)
    with pytest.raises(ModelMoved, match="moves to the trainer target; send it again"):
        await waiting
    for process in (source, await trainers.start("source")):
        scheduler = process.scheduler
        for call in (
            process.send(batch(2)),
            process.send(batch(1)),
            process.send(creation()),
            scheduler.find(MODEL, 1),
            scheduler.find(MODEL, 3),
            scheduler.describe(MODEL, 1),
            scheduler.check_held(MODEL),
            scheduler.delete(MODEL, lambda: None),
        ):
            with pytest.raises(ModelMoved) as raised:
                await call
            assert raised.value.metadata["trainer_id"] == "target"
        assert not process.engine.models
    await trainers.running["source"].moving.forget(MODEL, MOVE.move_id)
    with pytest.raises(ModelNotFound):
        await trainers.running["source"].send(batch(2))


async def test_a_parked_model_moves_as_it_lies_and_comes_back_when_it_is_asked_for(
    trainers: Trainers, alone: Process
) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    script = [creation(), batch(1), step(2), batch(3)]
    await run(alone, [*script, step(4)])
    await run(source, script)
    await asyncio.gather(*source.scheduler.tasks)
    await source.scheduler.parking.park_idle(0)
    assert not source.engine.models
    await move(source, target)
    assert not target.engine.models
    await run(target, [step(4)])
    assert_equal(await target.weights(MODEL), await alone.weights(MODEL))


async def test_a_batch_that_has_begun_ends_at_the_source_and_one_that_has_not_begun_runs_at_the_target(
    trainers: Trainers, alone: Process
) -> None:
    script = [creation(), batch(1), batch(2), step(3)]
    await run(alone, script)
    source, target = await trainers.start("source"), await trainers.start("target")
    await run(source, script[:1])
    sent = [await source.send(one) for one in script[1:]]
    await until(lambda: sent[0].has_begun)  # two micro-batches
    await source.moving.release(MODEL, MOVE)
    assert isinstance(sent[0].outcome.result(), Answer)
    await target.moving.adopt(MODEL, MOVE.move_id)
    await answered(target)
    assert_equal(await target.weights(MODEL), await alone.weights(MODEL))


async def test_a_request_that_is_being_stored_when_its_model_is_released_is_not_lost(trainers: Trainers) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    await run(source, [creation()])
    stored = asyncio.Event()
    append = Journal.append

    async def slow(self: Journal, *arguments: Any, **settings: Any) -> None:
        await stored.wait()
        await append(self, *arguments, **settings)

    with mock.patch.object(Journal, "append", slow):
        sending = asyncio.create_task(source.send(batch(1)))
        await until(lambda: source.scheduler.models.is_queued(MODEL, 1))
        releasing = asyncio.create_task(source.moving.release(MODEL, MOVE))
        await until(lambda: MODEL in source.scheduler.models.moved)
        stored.set()
        operation = await sending
        await releasing
    assert isinstance(operation.outcome.result(), ModelMoved)
    await target.moving.adopt(MODEL, MOVE.move_id)
    await answered(target)
    assert isinstance(await target.outcome(MODEL, 1), Answer)


async def test_a_save_in_work_is_finished_by_the_source(trainers: Trainers) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    await run(source, [creation(), batch(1), step(2)])
    begun, go = asyncio.Event(), asyncio.Event()
    checkpoints = source.operations.loads.checkpoints
    writes_to = checkpoints.writes_to

    async def slow(*arguments: Any, **settings: Any) -> Any:
        begun.set()
        await go.wait()
        return await writes_to(*arguments, **settings)

    with mock.patch.object(checkpoints, "writes_to", slow):
        saving = await source.send(save(3, "one"))
        await begun.wait()
        releasing = asyncio.create_task(source.moving.release(MODEL, MOVE))
        await until(lambda: MODEL in source.scheduler.models.moved)
        go.set()
        await releasing
    await target.moving.adopt(MODEL, MOVE.move_id)
    assert await target.outcome(MODEL, 3) == saving.outcome.result()


@IN_BOTH
async def test_a_model_comes_back_to_a_trainer_that_had_released_it(trainers: Trainers, alone: Process) -> None:
    script = [creation(), batch(1), step(2), batch(3), step(4), batch(5), step(6)]
    await run(alone, script)
    source, target = await trainers.start("source"), await trainers.start("target")
    await run(source, script[:3])
    await move(source, target)
    await run(target, script[3:5])
    await move(target, source, BACK)
    await run(source, script[5:])
    assert_equal(await source.weights(MODEL), await alone.weights(MODEL))
    source = await trainers.start("source")
    assert_equal(await source.weights(MODEL), await alone.weights(MODEL))
    target = await trainers.start("target")
    assert (await has(source), await has(target)) == (True, False)


# Faults


STEPS = [
    pytest.param("source", moving, "withhold", id="before the model is stopped"),
    pytest.param("source", Restorer, "put_away", id="once it is stopped"),
    pytest.param("source", MovedModels, "export", id="once it is parked"),
    pytest.param("source", Packages, "write", id="once its rows are read"),
    pytest.param("source", MovedModels, "release", id="once the package is written"),
    pytest.param("source", ModelQueues, "remove", id="once the source has given it up"),
    pytest.param("target", Packages, "read", id="before the package is read"),
    pytest.param("target", MovedModels, "adopt", id="once the target has the snapshot"),
    pytest.param("target", moving, "resume", id="once the target has it"),
    pytest.param("source", MovedModels, "forget", id="before the source forgets it"),
    pytest.param("source", ModelQueues, "forget_moved", id="once the source has forgotten it"),
    pytest.param("source", Packages, "delete", id="before the package is deleted"),
]


@IN_BOTH_OF_THE_SLOW
@pytest.mark.parametrize(("dies", "owner", "method"), STEPS)
async def test_at_every_step_of_a_move_a_trainer_may_die_and_exactly_one_has_the_model_in_the_end(
    trainers: Trainers, undisturbed: Undisturbed, dies: str, owner: Any, method: str
) -> None:
    trainers.settings = {"policy": SnapshotPolicy(2, 0, 0)}
    source, target = await trainers.start("source"), await trainers.start("target")
    sent = [await source.send(one) for one in SCRIPT]
    await asyncio.wait([sent[9].outcome])

    def die(*arguments: Any, **settings: Any) -> Any:
        raise Killed

    with mock.patch.object(owner, method, die), pytest.raises(Killed):
        await move(source, target)
    assert [await has(source), await has(target)] in ([True, False], [False, False], [False, True])
    if await has(target):
        await answered(target)  # the trainers of this test share the base model, so only one may compute at a time
    if dies == "source":
        source = await trainers.start("source")
    else:
        target = await trainers.start("target")
    assert [await has(source), await has(target)] in ([True, False], [False, False], [False, True])
    await move(source, target)  # as whoever moves the model does again
    assert (await has(source), await has(target)) == (False, True)
    await answered(target)
    await assert_alike(target, undisturbed)
    assert await source.journal.moved.all() == {}
    restarted = await trainers.start("target")
    assert_equal(await restarted.weights(MODEL), undisturbed.weights)


@IN_BOTH
async def test_every_step_of_a_move_may_be_repeated(trainers: Trainers) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    await run(source, [creation(), batch(1), step(2)])
    await asyncio.gather(*(source.moving.release(MODEL, MOVE) for _ in range(3)))
    await asyncio.gather(*(target.moving.adopt(MODEL, MOVE.move_id) for _ in range(3)))
    if not trainers.journals.url:
        await source.moving.release(MODEL, MOVE)
    await run(target, [batch(3)])
    await target.moving.adopt(MODEL, MOVE.move_id)
    for process in (source, target, source, target):
        await process.moving.forget(MODEL, MOVE.move_id)
    await run(target, [step(4)])
    assert isinstance(await target.outcome(MODEL, 4), Answer)
    assert target.count("adopted_models_total") == 1
    assert source.count("released_models_total") == 1


@pytest.mark.parametrize("broken", ["snapshot", "package"])
async def test_a_model_that_cannot_be_released_goes_on_where_it_is(
    trainers: Trainers, undisturbed: Undisturbed, broken: str
) -> None:
    source = await trainers.start("source")
    sent = [await source.send(one) for one in SCRIPT]
    await asyncio.wait([sent[3].outcome])

    def fail(*arguments: Any, **settings: Any) -> Any:
        raise OSError(28, "No space left on device")

    owner = source.snapshots.files if broken == "snapshot" else Packages
    with mock.patch.object(owner, "write", fail), pytest.raises(OutOfCapacity, match=r"(?i)no space left"):
        await source.moving.release(MODEL, MOVE)
    await answered(source)
    await assert_alike(source, undisturbed)


async def test_a_target_without_room_lets_the_model_wait(trainers: Trainers) -> None:
    source = await trainers.start("source")
    trainers.settings = {"max_models": 1}
    target = await trainers.start("target")
    await run(target, [creation("other")])
    await target.send(step(2, model_id="other"))  # waits for 1, so the model is not parked
    await run(source, [creation(), batch(1)])
    await source.send(step(3))
    await source.send(batch(2))
    await source.moving.release(MODEL, MOVE)
    with mock.patch("trainer_service.scheduling.parking._PATIENCE_S", 0.01):
        await target.moving.adopt(MODEL, MOVE.move_id)
        await asyncio.sleep(0.05)
        for seq_id in (2, 3):
            if seq_id in [entry.seq_id for entry in await target.journal.history(MODEL) if not entry.state]:
                with pytest.raises(NotReady, match="on its way into memory"):
                    await target.scheduler.find(MODEL, seq_id)
    await target.scheduler.delete("other", lambda: target.engine.delete_model("other"))
    await answered(target)


async def test_a_damaged_snapshot_of_a_parked_model_is_not_taken_along(trainers: Trainers, alone: Process) -> None:
    script = [creation(), batch(1), step(2), batch(3), step(4)]
    await run(alone, [*script, batch(5), step(6)])
    trainers.settings = {"policy": SnapshotPolicy(1, 0, 0)}
    source, target = await trainers.start("source"), await trainers.start("target")
    await run(source, script[:3])
    await until(lambda: source.snapshots.files.seq_ids(MODEL))  # no step takes a snapshot while one is being written
    await asyncio.gather(*source.snapshots.tasks)
    await run(source, script[3:])
    await until(lambda: len(source.snapshots.files.seq_ids(MODEL)) == 2)
    await asyncio.gather(*source.scheduler.tasks, *source.snapshots.tasks)
    await source.scheduler.parking.park_idle(0)
    assert not source.engine.models
    found = trainers.folder.rglob("adapter.npy")
    (newest,) = [path for path in found if "4" in path.parts and "alone" not in path.parts]
    newest.write_bytes(b"damaged")
    await move(source, target)
    await run(target, [batch(5), step(6)])
    assert_equal(await target.weights(MODEL), await alone.weights(MODEL))


async def test_a_damaged_package_is_written_again(trainers: Trainers) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    await run(source, [creation(), batch(1), step(2)])
    await source.moving.release(MODEL, MOVE)
    (rows,) = trainers.folder.rglob(ROWS)
    rows.write_bytes(rows.read_bytes()[:-10])
    with pytest.raises(DataCorrupted, match="is damaged"):
        await target.moving.adopt(MODEL, MOVE.move_id)
    assert not await has(target)
    await move(source, target)
    assert await has(target)


@IN_BOTH
@pytest.mark.parametrize("num_read", [0, 1])
async def test_operations_that_cannot_be_read_are_adopted_all_or_none(
    trainers: Trainers, form: str, num_read: int
) -> None:
    """`num_read`: how often the operations can be read whole before: at 0 the check finds the damage, at 1 the
    transaction meets it after its first rows."""
    source, target = await trainers.start("source"), await trainers.start("target")
    await run(source, [creation(), batch(1), step(2)])
    await source.moving.release(MODEL, MOVE)
    chunks, calls = run_file.chunks, []

    def damaged(path: Path) -> Iterator[list[tuple[Any, ...]]]:
        calls.append(path)
        for number, chunk in enumerate(chunks(path)):
            yield chunk
            if len(calls) > num_read and not number:
                raise DataCorrupted("damaged")

    with mock.patch.object(run_file, "chunks", damaged), pytest.raises(ServiceError) as refused:
        await target.moving.adopt(MODEL, MOVE.move_id)
    assert isinstance(refused.value, DataCorrupted) == (num_read == 0)
    assert not await has(target)
    await move(source, target)
    assert await has(target)
    await run(target, [batch(3)])
    assert [entry.seq_id for entry in await target.journal.history(MODEL)][-1] == 3


async def test_only_the_named_trainer_adopts_and_only_what_was_released(trainers: Trainers) -> None:
    source, target, third = [await trainers.start(name) for name in ("source", "target", "third")]
    await run(source, [creation(), batch(1)])
    for refused in (
        target.moving.adopt(MODEL, MOVE.move_id),
        source.moving.release("s:train:9", MOVE),
    ):
        with pytest.raises((FailedPrecondition, ModelNotFound)):
            await refused
    await source.moving.release(MODEL, MOVE)
    with pytest.raises(FailedPrecondition, match="is for the trainer target, and this one is third"):
        await third.moving.adopt(MODEL, MOVE.move_id)
    with pytest.raises(FailedPrecondition, match=r"no package of 's:train:0' for the move 'b+'"):
        await target.moving.adopt(MODEL, BACK.move_id)
    with pytest.raises(FailedPrecondition, match="was released in another move"):
        await source.moving.release(MODEL, BACK)
    with pytest.raises(FailedPrecondition, match="was released by this trainer"):
        await source.moving.adopt(MODEL, MOVE.move_id)
    await source.moving.forget(MODEL, BACK.move_id)  # another move: nothing is deleted
    await target.moving.adopt(MODEL, MOVE.move_id)
    assert (await has(source), await has(target), await has(third)) == (False, True, False)


async def test_a_model_of_other_base_weights_is_refused(trainers: Trainers) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    await run(source, [creation()])
    await source.moving.release(MODEL, MOVE)
    target.operations.models.base_weights = "another"
    with pytest.raises(InvalidRequest, match="base_weights"):
        await target.moving.adopt(MODEL, MOVE.move_id)
    assert not await has(target)


async def test_a_failed_creation_and_a_lost_model_are_not_released(trainers: Trainers) -> None:
    source = await trainers.start("source")
    await source.send(creation(from_location="s:train:1/weights/none", base_model="", lora_config=None))
    await until(lambda: not source.scheduler.models.is_known(MODEL))
    with pytest.raises(ModelNotFound):
        await source.moving.release(MODEL, MOVE)
