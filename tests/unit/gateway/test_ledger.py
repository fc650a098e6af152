"""What was used reaches the database once: whoever counts it, and however often a write is cut off or fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiosqlite
import pytest
from sqlalchemy import func, select

from gateway.database.outages import DatabaseUnusable
from gateway.database.store import Store
from gateway.database.tables.tenants import Usage
from gateway.metrics import Metrics
from gateway.tenants.ledger import Ledger

LIMIT_S = 60.0
"""A hang ends the test; nothing here is timed."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(f"sqlite+aiosqlite:///{tmp_path / 'gateway.db'}", Metrics())
    await store.migrate()
    yield store
    await store.close()


async def trained(store: Store) -> int:
    async with store.begin() as db:
        return await db.scalar(select(func.sum(Usage.amount)).where(Usage.kind == "training")) or 0


def train(ledger: Ledger, seq_id: int, *, is_new: bool = True) -> None:
    ledger.train("s:train:0", seq_id, 10, base_model="b", session_id="s", is_new=is_new)


async def test_an_operation_that_several_see_is_counted_once(store: Store) -> None:
    submitter, *others = ledgers = [Ledger(store) for _ in range(3)]
    for seq_id in range(1200):
        train(submitter, seq_id)
        for other in others:
            train(other, seq_id, is_new=False)
    for ledger in ledgers[::-1]:
        await ledger.flush()
    train(others[0], 0, is_new=False)
    await others[0].flush()
    assert await trained(store) == 12000


async def test_a_write_that_fails_leaves_no_mark_and_is_done_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(store)
    train(ledger, 1)
    ledger.use("checkpoint", 1, base_model="b")

    def fail(_: object) -> None:
        raise OSError("disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("gateway.tenants.ledger._values", fail)
        ledger.audit("key_create", owner="ada")
        with pytest.raises(DatabaseUnusable, match="disk is full"):
            await ledger.flush()
    assert await trained(store) == 0
    train(ledger, 1, is_new=False)  # what is asked for again meanwhile
    train(ledger, 2)
    await ledger.flush()
    assert await trained(store) == 20


async def test_a_write_whose_caller_is_cancelled_is_done_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(store)
    train(ledger, 1)
    ledger.use("sampling_sample", 5, base_model="b", owner="ada")
    written, go_on = asyncio.Event(), asyncio.Event()
    write = ledger._write

    async def and_wait(gathered: object) -> None:
        await write(gathered)  # type: ignore[arg-type]
        written.set()
        await go_on.wait()

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_write", and_wait)
        flushing = asyncio.create_task(ledger.flush())
        async with asyncio.timeout(LIMIT_S):
            await written.wait()
        flushing.cancel()
        asyncio.get_running_loop().call_soon(go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await flushing
    await ledger.flush()
    async with store.begin() as db:
        assert await db.scalar(select(func.sum(Usage.amount))) == 15
    assert ledger.tokens("ada") == 5


async def test_a_commit_that_is_slower_than_its_caller_waits_counts_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(store)
    ledger.use("sampling_sample", 5, base_model="b", owner="ada")
    committed, go_on = asyncio.Event(), asyncio.Event()
    commit = aiosqlite.Connection.commit

    async def and_wait(self: aiosqlite.Connection) -> None:
        await commit(self)
        committed.set()
        await go_on.wait()

    with monkeypatch.context() as patch:
        patch.setattr(aiosqlite.Connection, "commit", and_wait)
        flushing = asyncio.create_task(ledger.flush())
        async with asyncio.timeout(LIMIT_S):
            await committed.wait()
            flushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flushing
        go_on.set()
        await ledger.flush()
    async with store.begin() as db:
        assert await db.scalar(select(func.sum(Usage.amount))) == 5
    assert ledger.tokens("ada") == 5
