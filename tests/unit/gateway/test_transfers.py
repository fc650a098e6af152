"""Copies and imports whose gateway ends, or loses its database, before what the trainer has made is indexed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import OperationalError

from gateway.database.checkpoints import CheckpointRows
from gateway.database.operations import IMPORT, TRANSFERS
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.operations import Operation
from gateway.database.tables.sessions import Model
from gateway.database.tables.tenants import AuditEvent
from gateway.storage import transfers
from tests.support.waiting import until
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack
from tinsmith.rpc.paths import TinkerPath

pytestmark = pytest.mark.gateway(reap_interval_s=0.2)

Ask = Callable[[Client], Coroutine[Any, Any, httpx.Response]]


async def source(client: Client) -> str:
    model_id = await client.model(await client.session())
    receipt = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"})
    return (await client.result(receipt))["path"]


async def copying(client: Client) -> Ask:
    body = {"source_path": await source(client), "session_id": await client.session(), "model_seq_id": 3}
    return lambda client: client.post("/api/v1/copy_weights", json=body)


async def importing(client: Client) -> Ask:
    query = {"base_model": BASE_MODEL, "name": "mine"}
    return lambda client: client.post("/api/v1/checkpoints/import", params=query, content=b"archive")


async def listed(client: Client) -> list[str]:
    runs = (await client.get("/api/v1/training_runs")).json()["training_runs"]
    found = []
    for run in runs:
        reply = await client.get(f"/api/v1/training_runs/{run['training_run_id']}/checkpoints")
        found += [one["tinker_path"] for one in reply.json()["checkpoints"]]
    return sorted(found)


async def notes(stack: Stack, *, is_settled: bool = False) -> int:
    assert stack.server is not None
    over = Operation.settled_at.is_not(None) if is_settled else Operation.settled_at.is_(None)
    async with stack.server.app.state.gateway.store.begin() as db:
        query = select(func.count()).select_from(Operation).where(Operation.kind.in_(TRANSFERS), over)
        return await db.scalar(query) or 0


async def entries(client: Client, event: str) -> int:
    """How many the audit log has."""
    return [one["event"] for one in (await client.get("/api/v1/audit")).json()["entries"]].count(event)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("make", "event"), [(copying, "checkpoint_copy"), (importing, "checkpoint_import")])
async def test_a_checkpoint_that_the_trainer_made_and_nobody_indexed_is_found(
    stack: Stack,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Client], Awaitable[Ask]],
    event: str,
    *,
    restarts: bool,
) -> None:
    ask = await make(client)
    await stack.restart_gateway(reap_interval_s=3600 if restarts else 0.2)
    before = await listed(client)

    async def full(*_: object, **__: object) -> None:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointRows, "put", full)
        assert (await ask(client)).status_code == 500
        (location,) = {f"tinker://{location}" for location in stack.trainer.checkpoints} - set(before)
        if restarts:
            await stack.stop_gateway()
    if restarts:
        await stack.start_gateway()
    caplog.clear()  # what the disk has left there
    await until(lambda: notes(stack, is_settled=True))
    assert await listed(client) == sorted([*before, location])
    assert await entries(client, event) == 1
    run_id = location.removeprefix("tinker://").partition("/")[0]
    session = (await client.get(f"/api/v1/sessions/{run_id.partition(':')[0]}")).json()
    assert session["training_run_ids"] == [run_id]
    if make is copying:
        assert (await ask(client)).json() == {"tinker_path": location}, "a repeat"
    else:
        assert (await client.delete(f"/api/v1/training_runs/{run_id}/checkpoints/weights/mine")).status_code == 200


async def lose(stack: Stack, path: str) -> None:
    """As if the gateway had ended between the trainer's copy and its row."""
    store = stack.gateway.store
    await stack.gateway.ledger.flush()
    async with store.begin() as db:
        await db.execute(delete(Checkpoint).where(Checkpoint.path == path))
    async with store.begin() as db:
        await db.execute(delete(Model).where(Model.model_id == TinkerPath.parse(path, field="path").run_id))
        await db.execute(update(Operation).where(Operation.request_id == path).values(settled_at=None))
        await db.execute(delete(AuditEvent))


@pytest.mark.gateway(reap_interval_s=3600)
@pytest.mark.parametrize("finder", ["a repeat", "a reader", "the reaper"])
async def test_a_copy_that_was_left_is_in_the_audit_log_once_whoever_finds_it(
    stack: Stack, client: Client, finder: str
) -> None:
    ask = await copying(client)
    path = (await ask(client)).json()["tinker_path"]
    await lose(stack, path)
    if finder == "a reader":
        assert (await client.post("/api/v1/weights_info", json={"tinker_path": path})).status_code == 200
    if finder != "a repeat":
        await stack.gateway.storage.transfers.finish_left()
    assert (await ask(client)).json() == {"tinker_path": path}
    assert (await ask(client)).json() == {"tinker_path": path}
    await stack.gateway.storage.transfers.finish_left()
    assert await entries(client, "checkpoint_copy") == 1
    run_id = path.removeprefix("tinker://").partition("/")[0]
    assert (await client.get(f"/api/v1/training_runs/{run_id}")).status_code == 200
    assert (await notes(stack), await notes(stack, is_settled=True)) == (0, 1)


@pytest.mark.parametrize(("make", "event"), [(copying, "checkpoint_copy"), (importing, "checkpoint_import")])
async def test_an_answered_transfer_is_in_the_audit_log(
    stack: Stack,
    client: Client,
    make: Callable[[Client], Awaitable[Ask]],
    event: str,
) -> None:
    ask = await make(client)
    assert (await ask(client)).status_code == 200
    async with stack.gateway.store.begin() as db:
        query = select(func.count()).select_from(AuditEvent).where(AuditEvent.event == event)
        assert await db.scalar(query) == 1


async def test_a_transfer_that_fails_for_good_leaves_no_note(stack: Stack, client: Client) -> None:
    query = {"base_model": BASE_MODEL, "name": "refused"}
    assert (await client.post("/api/v1/checkpoints/import", params=query, content=b"x")).status_code == 400
    body = {"source_path": await source(client), "session_id": await client.session(), "model_seq_id": 3}
    stack.trainer.checkpoints.clear()
    assert (await client.post("/api/v1/copy_weights", json=body)).status_code == 404
    assert (await notes(stack), await notes(stack, is_settled=True)) == (0, 0)


async def test_an_unfinished_transfer_is_waited_for_and_one_never_begun_is_forgotten(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = await copying(client)
    copy, has_begun, may_end = stack.trainer.CopyCheckpoint, asyncio.Event(), asyncio.Event()

    async def slow(request: Any, context: Any) -> Any:
        has_begun.set()
        await may_end.wait()
        return await copy(request, context)

    stack.trainer.CopyCheckpoint = slow  # type: ignore[method-assign]
    await stack.trainer_backend.stop()
    await stack.trainer_backend.start()
    await stack.restart_gateway()
    monkeypatch.setattr(transfers, "_PATIENCE_S", -1.0)
    call = asyncio.create_task(ask(client))
    await has_begun.wait()
    await asyncio.sleep(0.5)  # the reaper comes by
    assert await notes(stack) == 1
    assert stack.server is not None
    gateway = stack.server.app.state.gateway
    left = gateway.storage.transfers.operation(IMPORT, TinkerPath("0" * 32 + ":train:0", "weights", "never"))
    left.gateway_id = "dead"
    await gateway.store.operations.add(left)
    await until(lambda: is_one(stack))
    may_end.set()
    assert (await call).status_code == 200
    assert (await notes(stack), await notes(stack, is_settled=True)) == (0, 1)


async def is_one(stack: Stack) -> bool:
    return await notes(stack) == 1
