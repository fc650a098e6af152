"""A trainer is lost, with its journal in a database: another one takes its models from there, and loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from tests.support.parameters import fast_ones
from tests.unit.trainer_service.journals import batch as body
from tests.unit.trainer_service.restoring import Process
from tests.unit.trainer_service.test_moving import (
    MOVE,
    Trainers,
    Undisturbed,
    answered,
    assert_alike,
    has,
    trainers,
    undisturbed,
)
from tests.unit.trainer_service.test_restore import MODEL, SCRIPT, batch, creation, run, step
from tinsmith.errors import FailedPrecondition, ModelNotFound, NotReady
from trainer_service.durability.journal_database import Superseded
from trainer_service.durability.snapshots import SnapshotPolicy

__all__ = ["trainers", "undisturbed"]
LEASE = {"lease_s": 0.05, "renew_s": 3600.0}
"""A trainer that writes nothing for 50 ms counts as dead."""


@pytest.fixture
def form() -> str:
    return "postgres"


@pytest.fixture(autouse=True)
def lease(trainers: Trainers) -> None:
    trainers.leases = dict(LEASE)


@asynccontextmanager
async def standing_still(run: Callable[[Callable[..., None]], Awaitable[Any]]) -> AsyncIterator[asyncio.Task[Any]]:
    """A context in which a function that was given to `run`, which calls it on a thread, does not return. Gives the
    task of the call."""
    begun, goes_on = threading.Event(), threading.Event()

    def stand_still(*_: object) -> None:
        begun.set()
        goes_on.wait(60)

    job = asyncio.ensure_future(run(stand_still))
    await asyncio.to_thread(begun.wait)
    try:
        yield job
    finally:
        goes_on.set()


@asynccontextmanager
async def stopped(process: Process) -> AsyncIterator[None]:
    """A context in which the trainer's journal stands still within a transaction, as in a process that is stopped."""
    async with standing_still(process.journal.writer.submit) as job:
        yield
    with pytest.raises(Superseded):
        await job


@asynccontextmanager
async def computing_nothing(process: Process) -> AsyncIterator[None]:
    """A context in which the trainer computes nothing: the trainers of these tests share one base model, with which one
    at a time may compute."""
    async with standing_still(process.scheduler.compute.run_alone) as job:
        yield
    await job


async def id_of(trainers: Trainers, name: str) -> str:
    connection = await asyncpg.connect(trainers.journals.url)
    try:
        return await connection.fetchval("SELECT id FROM tinsmith_journal.trainers WHERE name = $1", name)
    finally:
        await connection.close()


async def fenced(target: Process, trainer_id: str) -> None:
    """Returns once the trainer is fenced; as long as it counts as alive, this is tried again."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await target.journal.moved.fence(trainer_id)
            except NotReady:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "policy", [SnapshotPolicy(0, 0, 0), SnapshotPolicy(2, 0, 0)], ids=["no-snapshots", "snapshots"]
)
@pytest.mark.parametrize("num_done", fast_ones([0, 8, 20], [8]))
async def test_the_runs_of_a_trainer_that_stands_still_go_on_elsewhere_without_a_difference(
    trainers: Trainers, undisturbed: Undisturbed, num_done: int, policy: SnapshotPolicy
) -> None:
    trainers.settings["policy"] = policy
    source, target = await trainers.start("source"), await trainers.start("target")
    source_id = await id_of(trainers, "source")
    sent = [await source.send(one) for one in SCRIPT]
    await asyncio.wait([sent[num_done].outcome])
    async with computing_nothing(source):
        async with stopped(source):
            await fenced(target, source_id)
            await target.moving.adopt(MODEL, MOVE.move_id, fenced_trainer_id=source_id)
        assert await has(target)
        for late in (
            source.journal.append(MODEL, 99, body(99)),
            source.journal.check_ours(),
            source.journal.live_model(MODEL),
        ):
            with pytest.raises(Superseded, match="held by trainer 'target', which adopts its runs"):
                await late
        await answered(target)
        await assert_alike(target, undisturbed)


async def test_a_trainer_that_comes_back_has_the_runs_that_were_not_adopted(trainers: Trainers) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    source_id, other = await id_of(trainers, "source"), "s:train:1"
    for model_id in (MODEL, other):
        await run(source, [creation(model_id=model_id)])
    await source.stop()
    await fenced(target, source_id)
    await target.moving.adopt(MODEL, MOVE.move_id, fenced_trainer_id=source_id)
    await target.moving.adopt(MODEL, MOVE.move_id, fenced_trainer_id=source_id)  # a repeat changes nothing
    source = await trainers.start("source")
    assert [model.model_id for model in await source.journal.live_models()] == [other]
    assert source.snapshots.files.seq_ids(MODEL) == target.snapshots.files.seq_ids(MODEL)
    with pytest.raises(NotReady, match="is not fenced"):
        await target.moving.adopt(other, MOVE.move_id, fenced_trainer_id=source_id)
    assert not await has(source)
    with pytest.raises(ModelNotFound):
        await source.send(batch(1))
    await run(target, [batch(1), step(2)])


async def test_a_trainer_that_is_alive_is_not_fenced_and_goes_on(trainers: Trainers) -> None:
    source = await trainers.start("source")
    trainers.leases["lease_s"] = 3600.0
    target = await trainers.start("target")
    source_id = await id_of(trainers, "source")
    await run(source, [creation()])
    with pytest.raises(NotReady, match=r"trainer 'source' is alive \(process"):
        await target.journal.moved.fence(source_id)
    with pytest.raises(NotReady, match="is not fenced"):
        await target.moving.adopt(MODEL, MOVE.move_id, fenced_trainer_id=source_id)
    await run(source, [batch(1), step(2)])
    assert (await has(source), await has(target)) == (True, False)


async def test_what_a_lost_trainer_had_released_is_adopted_from_its_package(
    trainers: Trainers, undisturbed: Undisturbed
) -> None:
    source = await trainers.start("source")
    target = await trainers.start("target")
    await run(source)
    await source.moving.release(MODEL, MOVE)
    await source.stop()
    source_id = await id_of(trainers, "source")
    await fenced(target, source_id)
    await target.moving.adopt(MODEL, MOVE.move_id, fenced_trainer_id=source_id)
    await assert_alike(target, undisturbed)
    assert not await (await trainers.start("source")).journal.moved.all(), "nothing is left of the move"


async def test_a_run_that_the_lost_trainer_does_not_have_and_other_trainers_are_refused(trainers: Trainers) -> None:
    source, target = await trainers.start("source"), await trainers.start("target")
    source_id, own_id = await id_of(trainers, "source"), await id_of(trainers, "target")
    await source.stop()
    await fenced(target, source_id)
    with pytest.raises(FailedPrecondition, match="no package of 's:train:9'"):
        await target.moving.adopt("s:train:9", MOVE.move_id, fenced_trainer_id=source_id)
    for name in ("0" * 32, own_id):
        with pytest.raises(FailedPrecondition, match=f"^trainer_id: the journal .* has no other trainer '{name}'"):
            await target.journal.moved.fence(name)


class TestWithAFile:
    @pytest.fixture
    def form(self) -> str:
        return "sqlite"

    async def test_a_trainer_whose_journal_is_a_file_fences_nobody(self, trainers: Trainers) -> None:
        target = await trainers.start("target")
        with pytest.raises(FailedPrecondition, match=r"^trainer_id: the journal of this trainer is a file"):
            await target.journal.moved.fence("0" * 32)
        with pytest.raises(FailedPrecondition, match=r"^fenced_trainer_id: the journal of this trainer is a file"):
            await target.moving.adopt(MODEL, MOVE.move_id, fenced_trainer_id="0" * 32)
