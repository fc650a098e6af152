"""Rows that the gateway's database drops after a while, and rows that it holds for ever."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import func, select, text, update

from gateway.database.forgetting import Forgetting
from gateway.database.tables.base import Base
from gateway.database.tables.history import Span
from gateway.database.tables.operations import CustomLoss, Operation
from gateway.database.tables.samples import SampleMark
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.database.tables.tenants import AuditEvent, CountedOperation, LedgerBatch, Usage
from gateway.gateway import Gateway
from tests.unit.gateway.commits import Statements
from tests.unit.gateway.stack import Client, Stack, sample_body
from tests.unit.gateway.test_custom_losses import loss

DAY_S = 86400.0


async def count(gateway: Gateway, table: type[Base]) -> int:
    async with gateway.store.begin() as db:
        return await db.scalar(select(func.count()).select_from(table)) or 0


async def change(gateway: Gateway, table: type[Base], **values: Any) -> None:
    async with gateway.store.begin() as db:
        await db.execute(update(table).values(**values))


async def busy_session(client: Client) -> str:
    """With a run, a checkpoint, a sampler, a sample and a custom loss."""
    session_id = await client.session()
    model_id = await client.model(session_id)
    await client.result((await client.forward_backward(model_id, 1)).json())
    await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": 2, "path": "last"}))
    sampler_id = await client.sampling_session(session_id)
    await client.result(await client.call("asample", sample_body(sampler_id, 0)))
    await client.result(await client.call("create_custom_loss", loss(session_id)))
    return session_id


async def test_only_the_history_of_a_session_that_ended_long_ago_stays(stack: Stack, client: Client) -> None:
    gateway = stack.gateway
    session_ids = [await busy_session(client) for _ in range(2)]
    for session_id in session_ids[:1]:
        await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    long_ago = time.time() - 8 * DAY_S
    for table in (SamplingSession, CustomLoss):
        await change(gateway, table, created_at=long_ago)
    gone = (SamplingSession, SampleMark, CustomLoss)
    await gateway.reaper._forgetting.forget()
    assert [await count(gateway, table) for table in gone] == [2, 2, 2]  # it has only just ended
    async with gateway.store.begin() as db:
        await db.execute(update(Session).where(Session.ended_at.is_not(None)).values(ended_at=long_ago))
    await gateway.reaper._forgetting.forget()
    async with gateway.store.begin() as db:
        left = [*await db.scalars(select(SamplingSession.session_id)), *await db.scalars(select(CustomLoss.session_id))]
    assert left == session_ids[1:] * 2
    assert await count(gateway, SampleMark) == 1
    await gateway.ledger.flush()
    assert [await count(gateway, table) for table in (Session, Model)] == [2, 2]
    assert await count(gateway, Usage) > 0
    runs = (await client.get("/api/v1/training_runs")).json()["training_runs"]
    assert len(runs) == 2
    assert all(run["last_checkpoint"] for run in runs)


async def test_only_the_newest_spans_and_audit_events_of_the_last_time_stay(stack: Stack, client: Client) -> None:
    await stack.restart_gateway(max_spans=2)
    gateway = stack.gateway
    await busy_session(client)
    await gateway.ledger.flush()
    assert await count(gateway, Span) > 2
    before = await count(gateway, AuditEvent)
    assert before > 0
    await gateway.reaper._forgetting.forget()
    assert (await count(gateway, Span), await count(gateway, AuditEvent)) == (2, before)
    await change(gateway, AuditEvent, at=time.time() - 366 * DAY_S)
    await gateway.reaper._forgetting.forget()
    assert await count(gateway, AuditEvent) == 0


async def test_operations_that_were_counted_after_their_models_release_are_forgotten(
    stack: Stack, client: Client
) -> None:
    gateway = stack.gateway
    live, released = [await client.model(await client.session()) for _ in range(2)]
    await gateway.store.models.release(released)
    async with gateway.store.begin() as db:
        await db.execute(update(Model).where(Model.model_id == released).values(released_at=time.time() - 100))
        db.add_all([CountedOperation(model_id=each, seq_id=1) for each in (live, released)])
    await gateway.reaper._forgetting.forget()
    async with gateway.store.begin() as db:
        assert list(await db.scalars(select(CountedOperation.model_id))) == [live]


async def test_batches_of_gateways_that_are_gone_are_forgotten(stack: Stack, client: Client) -> None:
    gateway = stack.gateway
    await busy_session(client)
    await gateway.ledger.flush()
    async with gateway.store.begin() as db:
        db.add(LedgerBatch(ledger_id="gone", number=9, written_at=time.time() - 31 * DAY_S))
    await gateway.reaper._forgetting.forget()
    assert await count(gateway, LedgerBatch) == 1


async def test_the_operation_of_a_copy_is_remembered_as_long_as_there_is_the_copy(stack: Stack, client: Client) -> None:
    await stack.restart_gateway(reap_interval_s=3600)
    gateway = stack.gateway
    session_id = await busy_session(client)
    body = {"source_path": f"tinker://{session_id}:train:0/weights/last", "session_id": session_id}
    paths = [(await client.call("copy_weights", body | {"model_seq_id": seq}))["tinker_path"] for seq in (1, 2)]
    await gateway.store.operations.add(
        Operation(
            request_id=f"{session_id}:train:1:7",
            model_id=f"{session_id}:train:1",
            kind="save_weights",
            fingerprint="",
            created_at=time.time(),
        )
    )
    run_id = paths[0].removeprefix("tinker://").partition("/")[0]
    assert (await client.delete(f"/api/v1/training_runs/{run_id}/checkpoints/weights/last")).status_code == 200
    before = await count(gateway, Operation)
    await Forgetting(gateway.config, store=gateway.store).forget()
    assert await count(gateway, Operation) == before, "a moment ago"
    await change(gateway, Operation, settled_at=time.time() - DAY_S)
    await change(gateway, Model, released_at=time.time() - DAY_S)
    await Forgetting(gateway.config, store=gateway.store).forget()
    async with gateway.store.begin() as db:
        assert list(await db.scalars(select(Operation.request_id))) == paths[1:]
    assert (await client.call("copy_weights", body | {"model_seq_id": 2}))["tinker_path"] == paths[1]


async def test_refusals_have_a_bound_and_are_deleted_without_reading_other_operations(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stack.restart_gateway(reap_interval_s=3600)
    gateway, session_id = stack.gateway, await client.session()
    for seq in range(5):
        body = {"session_id": session_id, "model_seq_id": seq, "base_model": "none", "lora_config": {"rank": 8}}
        assert "none" in (await client.result(await client.call("create_model", body)))["error"]
    monkeypatch.setattr("gateway.training.refusals._MAX_KEPT", 2)
    statements = Statements(gateway.store)
    await gateway.training.refusals.forget_old()
    async with gateway.store.begin() as db:
        kept = sorted(await db.scalars(select(Operation.request_id)))
        assert kept == [f"{session_id}:train:{seq}:0" for seq in (3, 4)]
        for statement in statements.of_all[:2]:
            plan = str(list(await db.execute(text(f"EXPLAIN QUERY PLAN {statement.replace('?', '0')}"))))
            assert "ix_operations_refused_at" in plan, plan
    # A refusal that has gone is given again.
    monkeypatch.setattr("gateway.training.refusals._MAX_KEPT", 0)
    await gateway.training.refusals.forget_old()
    await stack.restart_gateway()
    assert (await client.poll(kept[0])).status_code == 410
