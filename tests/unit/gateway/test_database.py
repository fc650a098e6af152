"""Several gateways on one SQLite file: their start, and what one learns of the ends of the other's sessions."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.database import connection
from gateway.database.outages import is_outage
from gateway.database.store import Store
from gateway.database.tables.sessions import SamplingSession
from gateway.metrics import Metrics
from gateway.schemas import SearchCursor, SearchSessions
from gateway.session_search import SessionSearch
from gateway.tenants.access import Caller
from tests.support.postgres import Postgres
from tests.support.waiting import until
from tests.unit.gateway.commits import Statements

_SAMPLED = {"base_model": "tiny", "version_id": "", "location": "", "created_at": 0.0}


async def test_gateways_that_start_at_the_same_time_on_a_new_file(tmp_path: Path) -> None:
    """SQLite does not wait when two want the write-ahead log of the same file: 1 pair in 5 failed."""
    for round_ in range(8):
        url = f"sqlite+aiosqlite:///{tmp_path / str(round_)}.db"
        stores = [Store(url, Metrics()) for _ in range(3)]
        await asyncio.gather(*(store.migrate() for store in stores))
        for store in stores:
            async with store.begin() as db:
                for setting, value in (("journal_mode", "wal"), ("busy_timeout", 30000), ("synchronous", 2)):
                    assert await db.scalar(text(f"PRAGMA {setting}")) == value
            await store.close()


async def test_a_file_that_stays_locked_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LOCKED_S", 0)
    file = tmp_path / "gateway.db"
    store = Store(f"sqlite+aiosqlite:///{file}", Metrics())
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        other.execute("PRAGMA user_version=1")
        with pytest.raises(Exception, match="database is locked") as told:
            await store.migrate()
        assert is_outage(told.value)
    await store.close()
    # The thread of the connection that failed must not outlive the event loop, to which it reports its end.
    await until(lambda: not any("_connection_worker_thread" in thread.name for thread in threading.enumerate()))


async def test_ends_at_another_gateway_are_noticed_by_the_index_however_many_sessions_live(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'gateway.db'}"
    here, there = (Store(url, Metrics()) for _ in range(2))
    await here.migrate()
    sessions = [await here.sessions.create(owner="o") for _ in range(9)]
    rows = [
        SamplingSession(sampling_session_id=f"{each.session_id}:sample:0", **_SAMPLED, session_id=each.session_id)
        for each in sessions
    ]
    for row in rows:
        await here.samplers.add(row)
    assert await here.sessions.forget_ended() == set()
    ended = sessions[3].session_id
    assert await there.sessions.end(ended, reason="success", detail=None)
    assert here.samplers.lives(f"{ended}:sample:0")
    statements = Statements(here)
    assert await here.sessions.forget_ended() == {ended}
    assert await here.sessions.forget_ended() == set()
    assert [here.samplers.lives(row.sampling_session_id) for row in rows] == [row.session_id != ended for row in rows]
    assert not await here.sessions.lives(ended)
    reading = [each for each in statements.of_all if "ended_at >" in each]
    assert len(reading) == 2
    async with here.begin() as db:
        plan = str(list(await db.execute(text(f"EXPLAIN QUERY PLAN {reading[0].replace('?', '0')}"))))
    assert "ix_sessions_ended_at" in plan, plan
    for store in (here, there):
        await store.close()


async def test_a_search_of_an_owners_sessions_sorts_none(tmp_path: Path) -> None:
    """Each page of a search would sort all of the owner's sessions again: 8.6 s for 200,000."""
    store = Store(f"sqlite+aiosqlite:///{tmp_path / 'gateway.db'}", Metrics())
    await store.migrate()
    caller = Caller(owner="o")
    created = [await store.sessions.create(owner="o") for _ in range(3)]
    statements = Statements(store)
    asked = SearchSessions.model_validate({"limit": 2})
    found, last = await SessionSearch(store).search(asked, caller=caller)
    assert last is not None
    cursor = SearchCursor(
        last_session_id=last.session_id, last_created_at=datetime.fromtimestamp(last.created_at, tz=UTC)
    )
    rest, _ = await SessionSearch(store).search(asked.model_copy(update={"cursor": cursor}), caller=caller)
    listed = [one.session.session_id for one in (*found, *rest)]
    assert sorted(listed) == sorted(one.session_id for one in created)
    async with store.begin() as db:
        for query in [each for each in statements.of_all if "ORDER BY sessions.created_at" in each]:
            plan = str(list(await db.execute(text(f"EXPLAIN QUERY PLAN {query.replace('?', '0')}"))))
            assert "ix_sessions_owner_created_at" in plan, plan
            assert "TEMP B-TREE" not in plan, plan
    await store.close()


@pytest.mark.slow
async def test_a_gateway_opens_ten_connections_at_most(postgres: Postgres) -> None:
    store = Store(postgres.new_database(), Metrics())

    async def look() -> int:
        async with store.begin() as db:
            await db.execute(text("SELECT pg_sleep(0.1)"))
            query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            return (await db.execute(text(query))).scalar_one()

    assert max(await asyncio.gather(*(look() for _ in range(40)))) == 10
    await store.close()
