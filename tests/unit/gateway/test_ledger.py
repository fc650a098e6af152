"""Usage reaches the database once, whichever gateway counts it and however often a write is cut off or fails."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import func, select
from sqlalchemy.util import await_only

from gateway.database.outages import DatabaseUnusable
from gateway.database.store import Store
from gateway.database.tables.base import Base
from gateway.database.tables.sessions import Model, Session
from gateway.database.tables.tenants import AuditEvent, HourlyUsage, LedgerBatch
from gateway.tenants.ledger import PER_STATEMENT, Ledger
from tests.unit.gateway.commits import Statements, commits, lost

LIMIT_S = 60.0
"""A hang ends the test; nothing here is timed."""


async def trained(store: Store) -> int:
    async with store.begin() as db:
        return await db.scalar(select(func.sum(HourlyUsage.amount)).where(HourlyUsage.kind == "training")) or 0


def train(ledger: Ledger, seq_id: int, *, is_new: bool = True) -> None:
    ledger.train("s:train:0", seq_id, 10, base_model="b", session_id="s", is_new=is_new)


async def test_an_operation_that_several_see_is_counted_once(store: Store) -> None:
    async with store.begin() as db:
        db.add(session_row("s", owner="ada"))
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
    ledger.use("storage", 1, base_model="b")

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


async def test_a_flush_of_500_sessions_takes_few_statements_and_loses_no_row(store: Store) -> None:
    """SQLite has one writer for all gateways and clients: a statement for each row would keep it for seconds."""
    ledger, num_sessions = Ledger(store), 500
    async with store.begin() as db:
        for i in range(num_sessions):
            db.add(session_row(f"s{i}", owner=f"o{i}"))
        await db.flush()
        for i in range(num_sessions):
            db.add(model_row(f"s{i}:train:0", session_id=f"s{i}"))
    statements = Statements(store)
    for number in (1, 2):
        for i in range(num_sessions):
            await store.sessions.whose(f"s{i}")
            for kind in ("sampling_prefill", "sampling_sample"):
                ledger.use(kind, 5, base_model="b", session_id=f"s{i}")
            ledger.train(f"s{i}:train:0", number, 10, base_model="b", session_id=f"s{i}", is_new=True)
            ledger.touch(f"s{i}:train:0")
        statements.of_all.clear()
        await ledger.flush()
        assert len(statements.of_all) <= 10, [statement[:60] for statement in statements.of_all]
        assert await trained(store) == 10 * num_sessions * number
        assert await rows(store, HourlyUsage) == 3 * num_sessions
        assert [ledger.tokens(f"o{i}") for i in range(num_sessions)] == [20 * number] * num_sessions
        async with store.begin() as db:
            touched = select(func.count()).where(Model.last_request_at.is_not(None))
            assert await db.scalar(touched) == num_sessions


async def test_many_rows_are_written_in_portions(store: Store) -> None:
    """50,000 spans, as after an outage, kept the event loop from others for 1.2 s."""
    ledger, statements = Ledger(store), Statements(store)
    for _ in range(2 * PER_STATEMENT + 1):
        ledger.audit("key_create", owner="ada")
    await ledger.flush()
    assert sum(statement.startswith("INSERT INTO audit") for statement in statements.of_all) >= 3
    assert await rows(store, AuditEvent) == 2 * PER_STATEMENT + 1


def session_row(session_id: str, *, owner: str) -> Session:
    return Session(session_id=session_id, owner=owner, created_at=0, last_seen_at=0, tags=[], user_metadata={})


def model_row(model_id: str, *, session_id: str) -> Model:
    row = Model(model_id=model_id, session_id=session_id, base_model="b", optimizer="adamw")
    row.user_metadata, row.created_at = {}, 0.0
    return row


async def rows(store: Store, table: type[Base]) -> int:
    async with store.begin() as db:
        return await db.scalar(select(func.count()).select_from(table)) or 0


async def test_a_commit_whose_connection_is_lost_counts_once(store: Store) -> None:
    ledger, other = Ledger(store), Ledger(store)
    session = await store.sessions.create(owner="eve")
    for _ in range(2):
        ledger.use("sampling_sample", 5, base_model="b", owner="ada")
        ledger.train("s:train:0", 1, 10, base_model="b", session_id=session.session_id, is_new=True)
        ledger.audit("key_create", owner="ada")
        with commits(store, lost), pytest.raises(DatabaseUnusable, match="connection lost"):
            await ledger.flush()
        other.use("sampling_sample", 5, base_model="b", owner="ada")  # whose batches have numbers of their own
        await other.flush()
        ledger.use("sampling_prefill", 7, base_model="b", owner="ada")  # what comes before it is sent again
        await ledger.flush()
    assert (await trained(store), await rows(store, AuditEvent), await rows(store, LedgerBatch)) == (10, 2, 2)
    async with store.begin() as db:
        assert await db.scalar(select(func.sum(HourlyUsage.amount))) == 2 * (5 + 5 + 7) + 10
    assert ledger.tokens("ada") == 2 * (5 + 5 + 7)


async def test_a_write_whose_answer_was_lost_counts_as_written(store: Store) -> None:
    """The rest of a budget is refused for good by what the database has."""
    ledger = Ledger(store)
    ledger.use("sampling_sample", 5, base_model="b", owner="ada")
    with commits(store, lost), pytest.raises(DatabaseUnusable):
        await ledger.flush()
    await ledger.flush()
    assert (ledger.written("ada"), ledger.tokens("ada")) == (5, 5)


async def test_a_write_that_is_cut_off_counts_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.tasks.GRACE_S", 0.01)
    ledger = Ledger(store)
    ledger.use("sampling_sample", 5, base_model="b", owner="ada")
    committed = asyncio.Event()

    def hang() -> None:
        committed.set()
        await_only(asyncio.Event().wait())

    with commits(store, hang):
        flushing = asyncio.create_task(ledger.flush())
        async with asyncio.timeout(LIMIT_S):
            await committed.wait()
            flushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flushing
    await ledger.flush()
    async with store.begin() as db:
        assert await db.scalar(select(func.sum(HourlyUsage.amount))) == 5
    assert ledger.tokens("ada") == 5
