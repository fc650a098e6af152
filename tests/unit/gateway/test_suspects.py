"""Deaths of samplers that requests may have caused, in the database of one or several gateways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import event, func, select

from gateway.database.outages import DatabaseUnusable
from gateway.database.store import Store
from gateway.database.tables.samples import SuspectRow
from gateway.sampling import suspects as module
from gateway.sampling.lives import Suspicion
from gateway.sampling.suspects import Suspects
from tinsmith.tasks import cancel_all


@asynccontextmanager
async def at_work(store: Store) -> AsyncIterator[Suspects]:
    """The suspects of one gateway, with the task that writes them."""
    suspects = Suspects(store)
    writing = asyncio.create_task(suspects.behind.run())
    yield suspects
    await cancel_all([writing])


@pytest.fixture
async def suspects(store: Store) -> AsyncIterator[Suspects]:
    async with at_work(store) as suspects:
        yield suspects


class Hanging:
    """Makes the next transaction of a store wait until `goes_on` is set."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = asyncio.Event()
        self.begun = asyncio.Event()
        begin = store.begin

        @asynccontextmanager
        async def late() -> AsyncIterator[Any]:
            monkeypatch.setattr(store, "begin", begin)
            self.begun.set()
            await self.goes_on.wait()
            async with begin() as db:
                yield db

        monkeypatch.setattr(store, "begin", late)


async def found(store: Store, content: str) -> tuple[int, bool]:
    """Deaths of a request, and whether it is condemned, as a gateway finds them that starts now."""
    suspects = Suspects(store)
    await suspects.read()
    mine = suspects.find(content)
    return mine.deaths, mine.is_condemned


async def num_rows(store: Store) -> int:
    return await store.first(select(func.count()).select_from(SuspectRow))


async def test_each_death_is_written_before_the_request_goes_on(store: Store, suspects: Suspects) -> None:
    assert suspects.are_none
    await asyncio.gather(*(suspects.note(content, Suspicion(1)) for content in "abc"))
    assert [await found(store, content) for content in "abcd"] == [(1, False)] * 3 + [(0, False)]
    await suspects.note("a", Suspicion(2, is_condemned=True))
    assert await found(store, "a") == (2, True)
    assert await num_rows(store) == 3


async def test_an_answer_ends_the_suspicion(store: Store, suspects: Suspects) -> None:
    await suspects.note("a", Suspicion(1))
    suspects.acquit("a")
    suspects.acquit("never a suspect")
    assert suspects.are_none
    await suspects.read()  # before that is written
    assert suspects.are_none
    await suspects.behind.flush()
    assert await num_rows(store) == 0


async def test_suspects_are_forgotten_after_a_while(
    store: Store, suspects: Suspects, monkeypatch: pytest.MonkeyPatch
) -> None:
    await suspects.note("a", Suspicion(2, is_condemned=True))
    later = time.time() + module.KEPT_S
    monkeypatch.setattr(module.time, "time", lambda: later)
    assert suspects.find("a").deaths == 0
    assert suspects.are_none
    assert await found(store, "a") == (0, False)
    await suspects.note("b", Suspicion(1))
    assert await num_rows(store) == 1


async def test_suspects_are_bounded(store: Store, suspects: Suspects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    for n in range(8):
        await suspects.note(str(n), Suspicion(1))
    assert [suspects.find(str(n)).deaths for n in range(8)] == [0] * 5 + [1] * 3
    assert await num_rows(store) == 3


async def test_without_a_database_they_are_counted_in_memory_and_written_later(
    store: Store, suspects: Suspects
) -> None:
    async with store.begin() as db:
        await (await db.connection()).exec_driver_sql("ALTER TABLE suspects RENAME TO away")
    await suspects.note("a", Suspicion(1))
    assert suspects.find("a").deaths == 1
    async with store.begin() as db:
        await (await db.connection()).exec_driver_sql("ALTER TABLE away RENAME TO suspects")
    await suspects.behind.flush()
    assert await found(store, "a") == (1, False)


async def test_any_number_of_requests_wait_once_for_a_database_that_hangs(
    store: Store, suspects: Suspects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAIT_S", 0.2)
    hanging = Hanging(store, monkeypatch)
    async with asyncio.timeout(5):
        await asyncio.gather(*(suspects.note(str(n), Suspicion(1)) for n in range(50)))
    assert await num_rows(store) == 0
    hanging.goes_on.set()
    await suspects.behind.flush()
    assert await num_rows(store) == 50


async def test_they_wait_once_for_a_database_that_refuses_after_a_while(
    store: Store, suspects: Suspects, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries = 0

    @asynccontextmanager
    async def refuses() -> AsyncIterator[Any]:
        nonlocal num_tries
        num_tries += 1
        await asyncio.sleep(0.2)
        raise DatabaseUnusable("silent")
        yield

    monkeypatch.setattr(store, "begin", refuses)
    await asyncio.gather(*(suspects.note(str(n), Suspicion(1)) for n in range(50)))
    assert num_tries == 1


async def test_of_requests_with_one_content_the_worst_counts(store: Store, suspects: Suspects) -> None:
    await suspects.note("a", Suspicion(3, is_condemned=True))
    await suspects.note("a", Suspicion(1))
    assert suspects.find("a").deaths == 3
    assert suspects.find("a").is_condemned
    assert await found(store, "a") == (3, True)


async def test_so_it_does_when_two_gateways_have_them(store: Store, suspects: Suspects) -> None:
    async with at_work(store) as others:
        await others.note("a", Suspicion(3, is_condemned=True))
        await asyncio.gather(*(each.note(content, Suspicion(1)) for each in (suspects, others) for content in "abcd"))
        assert [await found(store, content) for content in "abcd"] == [(3, True)] + 3 * [(1, False)]
        for each in (suspects, others):
            each.acquit("b")
        await asyncio.gather(suspects.behind.flush(), others.behind.flush())
    assert await found(store, "b") == (0, False)


async def test_deaths_of_more_than_an_hour_ago_do_not_count_though_their_row_is_still_there(
    store: Store, suspects: Suspects
) -> None:
    async with store.begin() as db:
        db.add(SuspectRow(content="a", deaths=2, is_condemned=True, died_at=time.time() - module.KEPT_S - 1))
    await suspects.note("a", Suspicion(1))
    assert await found(store, "a") == (1, False)


async def test_what_is_written_while_they_are_read_is_not_lost(
    store: Store, suspects: Suspects, monkeypatch: pytest.MonkeyPatch
) -> None:
    await suspects.note("answered", Suspicion(1))
    suspects.acquit("answered")
    writing = Hanging(store, monkeypatch)
    noting = asyncio.create_task(suspects.note("a", Suspicion(1)))
    await writing.begun.wait()
    reading = asyncio.create_task(suspects.read())
    await asyncio.wait({reading}, timeout=0.2)
    writing.goes_on.set()
    await asyncio.gather(noting, reading)
    assert [suspects.find(content).deaths for content in ("a", "answered")] == [1, 0]


async def test_deaths_while_they_are_read_are_not_lost(
    store: Store, suspects: Suspects, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Hanging(store, monkeypatch)
    task = asyncio.create_task(suspects.read())
    await reading.begun.wait()
    noting = asyncio.create_task(suspects.note("a", Suspicion(1)))
    await asyncio.sleep(0)
    reading.goes_on.set()
    await asyncio.gather(task, noting)
    assert suspects.find("a").deaths == 1


async def test_a_thousand_deaths_take_few_statements(store: Store, suspects: Suspects) -> None:
    statements: list[str] = []

    def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(store._engine.sync_engine, "before_cursor_execute", count)
    await asyncio.gather(*(suspects.note(str(n), Suspicion(1)) for n in range(1000)))
    assert await num_rows(store) == 1000
    for n in range(1000):
        suspects.acquit(str(n))
    await suspects.behind.flush()
    assert await num_rows(store) == 0
    assert len(statements) < 20


async def test_what_waits_for_the_database_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    monkeypatch.setattr(module, "_WAIT_S", 0.0)
    suspects = Suspects(store)
    for n in range(8):
        await suspects.note(str(n), Suspicion(1))
        suspects.acquit(str(n))
    assert len(suspects._changed) == 3
