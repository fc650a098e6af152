"""Work that is cancelled goes on for a moment, and no longer; tasks that are ended; events that are not set in time."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith import tasks
from tinsmith.tasks import cancel_all, set_within, to_its_end

LIMIT_S = 60.0
"""A hang ends the test; nothing here is timed."""


async def test_work_is_done_though_its_caller_is_cancelled() -> None:
    begun, may_end, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await may_end.wait()
        done.set()

    async with asyncio.timeout(LIMIT_S):
        calling = asyncio.create_task(to_its_end(work()))
        await begun.wait()
        calling.cancel()
        asyncio.get_running_loop().call_soon(may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert done.is_set()


async def test_work_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "GRACE_S", 0.01)
    begun, cut = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()

    async with asyncio.timeout(LIMIT_S):
        calling = asyncio.create_task(to_its_end(work()))
        await begun.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await cut.wait()


async def test_an_error_of_the_work_is_its_callers() -> None:
    async def work() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        await to_its_end(work())


async def test_tasks_have_ended_once_they_are_all_cancelled_and_their_errors_are_dropped() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()
            raise RuntimeError("dropped")

    task = asyncio.create_task(work())
    await begun.wait()
    await cancel_all([task])
    assert (ended.is_set(), task.done()) == (True, True)


async def test_an_event_is_set_in_time_or_not() -> None:
    event = asyncio.Event()
    assert not await set_within(event, 0.0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await set_within(event, LIMIT_S)
