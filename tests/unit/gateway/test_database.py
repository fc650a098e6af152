"""Several gateways that start on one new SQLite file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.database import connection
from gateway.database.outages import is_outage
from gateway.database.store import Store
from gateway.metrics import Metrics


async def test_gateways_that_start_at_the_same_time_on_a_new_file(tmp_path: Path) -> None:
    """SQLite does not wait when two want the write-ahead log of the same file: 1 pair in 5 failed."""
    for round_ in range(20):
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
    url = f"sqlite+aiosqlite:///{tmp_path / 'gateway.db'}"
    first, second = (Store(url, Metrics()) for _ in range(2))
    async with first._engine.connect() as other:
        await other.exec_driver_sql("BEGIN EXCLUSIVE")
        await other.exec_driver_sql("PRAGMA user_version=1")
        with pytest.raises(Exception, match="database is locked") as told:
            await second.migrate()
        assert is_outage(told.value)
    await first.close()
    await second.close()
