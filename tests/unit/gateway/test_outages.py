"""The database cannot be used for a while, after the trainer has done what was asked: the client sees a delay."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import asyncpg
import pytest
from sqlalchemy import func, insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection

from gateway.config import DATABASE
from gateway.database.connection import Database
from gateway.database.outages import DatabaseUnusable, is_outage
from gateway.database.tables.gateways import Setting
from gateway.database.tables.history import MetricPoint
from gateway.database.tables.tenants import HourlyUsage
from gateway.gateway import Gateway
from gateway.metrics import Metrics
from tests.support.waiting import until
from tests.unit.gateway.commits import Statements, commits, lost
from tests.unit.gateway.stack import Client, Stack, sample_body
from tinsmith_cli.ports import free_ports

pytestmark = pytest.mark.usefixtures("short_flushes")

Full = Callable[[str], AbstractContextManager[list[str]]]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Full:
    """While the block runs, this method of the store fails as on a full disk. Gives the calls."""

    depth = 0

    @contextmanager
    def failing(method: str) -> Any:
        nonlocal depth
        calls: list[str] = []
        depth += 1

        async def fail(*_: object, **__: object) -> None:
            calls.append(method)
            raise OperationalError("INSERT secret", {}, Exception("database or disk is full"))

        with monkeypatch.context() as patch:
            patch.setattr(method, fail)
            yield calls
        depth -= 1
        if depth == 0:
            assert "secret" not in caplog.text
            assert "database or disk is full" in caplog.text
            caplog.clear()

    return failing


@pytest.mark.gateway(long_poll_s=0.1)
async def test_a_save_that_the_database_cannot_take_ends_when_it_can(stack: Stack, client: Client, full: Full) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    receipt = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"})
    with full("gateway.database.checkpoints.CheckpointRows.put") as calls:
        stack.trainer.go.set()
        await until(lambda: len(calls) > 2)
        waiting = (await client.poll(receipt["request_id"])).json()
        assert (waiting["type"], waiting["queue_state"]) == ("try_again", "paused_capacity")
        assert "waits for the gateway's database" in waiting["queue_state_reason"]
    assert await client.result(receipt) == {"type": "save_weights", "path": f"tinker://{model_id}/weights/a"}
    listed = await client.get(f"/api/v1/training_runs/{model_id}/checkpoints")
    assert [one["checkpoint_id"] for one in listed.json()["checkpoints"]] == ["weights/a"]
    entries = (await client.get("/api/v1/audit")).json()["entries"]
    (created,) = [entry for entry in entries if entry["event"] == "checkpoint_create"]
    assert created["tinker_path"] == f"tinker://{model_id}/weights/a"


@pytest.mark.parametrize(
    "method", ["gateway.database.sessions.SamplerRows.add", "gateway.database.connection.Database.add_once"]
)
async def test_an_ephemeral_save_that_the_database_cannot_take_ends_when_it_can(
    stack: Stack, client: Client, full: Full, method: str
) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    save = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}
    receipt = await client.call("save_weights_for_sampler", save)
    with full(method) as calls:
        stack.trainer.go.set()
        await until(lambda: len(calls) > 2)
    sampling_session_id = (await client.result(receipt))["sampling_session_id"]
    # Once from this process's memory, and once from the database after a restart.
    for _ in range(2):
        sampler = await client.get(f"/api/v1/samplers/{sampling_session_id}")
        assert sampler.json()["sampler_id"] == sampling_session_id
        await stack.restart_gateway()


@pytest.mark.parametrize("kind", ["save", "copy"])
async def test_a_checkpoint_whose_commit_was_not_heard_of_is_counted_and_recorded_once(
    stack: Stack, client: Client, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    assert stack.server is not None
    gateway: Gateway = stack.server.app.state.gateway
    session_id = await client.session()
    model_id = await client.model(session_id)
    writing = "UPDATE operations SET settled_at"
    commits_lost: list[str] = []
    statements = Statements(gateway.store)

    def lose() -> None:
        if any(statement.startswith(writing) for statement in statements.taken()) and not commits_lost:
            commits_lost.append(kind)
            lost()

    async def save(seq_id: int) -> Any:
        body = {"model_id": model_id, "seq_id": seq_id, "path": "a", "overwrite": True}
        return await client.result(await client.call("save_weights", body))

    async def copy(path: str) -> int:
        body = {"source_path": path, "session_id": session_id, "model_seq_id": 7}
        return (await client.post("/api/v1/copy_weights", json=body)).status_code

    path = (await save(1))["path"]
    with commits(gateway.store, lose):
        if kind == "save":
            assert await save(2) == {"type": "save_weights", "path": path}
        else:
            assert await copy(path) == 503
            assert await copy(path) == 200
    assert commits_lost
    caplog.clear()  # it said that the database could not be used
    entries = (await client.get("/api/v1/audit")).json()["entries"]
    created, copied = [[e for e in entries if e["event"] == f"checkpoint_{what}"] for what in ("create", "copy")]
    assert (len(created), len(copied)) == ((2, 0) if kind == "save" else (1, 1))
    async with gateway.store.begin() as db:
        counted = await db.scalar(select(func.sum(HourlyUsage.amount)).where(HourlyUsage.kind == "checkpoint"))
    assert counted == len(created)


@pytest.mark.parametrize(("method", "suffix", "name"), [("POST", "/publish", "publish"), ("DELETE", "", "delete")])
async def test_a_change_whose_commit_was_not_heard_of_is_recorded_once(
    stack: Stack, client: Client, caplog: pytest.LogCaptureFixture, method: str, suffix: str, name: str
) -> None:
    assert stack.server is not None
    gateway: Gateway = stack.server.app.state.gateway
    model_id = await client.model(await client.session())
    await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"}))
    url = f"/api/v1/training_runs/{model_id}/checkpoints/weights/a{suffix}"
    statements = Statements(gateway.store)

    def lose() -> None:
        if any(statement.startswith("UPDATE checkpoints") for statement in statements.taken()):
            lost()

    with commits(gateway.store, lose):
        assert (await client.request(method, url)).status_code == 503
    caplog.clear()  # it said that the database could not be used
    assert (await client.request(method, url)).status_code in (200, 204)
    entries = (await client.get("/api/v1/audit")).json()["entries"]
    assert [entry["event"] for entry in entries if entry["event"] == f"checkpoint_{name}"] == [f"checkpoint_{name}"]


async def test_an_end_of_a_session_whose_commit_was_not_heard_of_is_one(stack: Stack, client: Client) -> None:
    assert stack.server is not None
    gateway: Gateway = stack.server.app.state.gateway
    session_id = await client.session()
    with commits(gateway.store, lost, of=asyncio.current_task()), pytest.raises(DatabaseUnusable):
        await gateway.store.sessions.end(session_id, reason="success", detail=None)
    await client.call("session_heartbeat", {"session_id": session_id}, status=410)


async def test_a_save_for_samplers_and_a_model_wait_for_the_database_too(
    stack: Stack, client: Client, full: Full
) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    stack.trainer.go.clear()
    body = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 5}
    saving = await client.call("save_weights_for_sampler", body)
    body = {"session_id": session_id, "model_seq_id": 1, "base_model": "Qwen/Qwen3-8B", "lora_config": {"rank": 8}}
    with full("gateway.database.sessions.ModelRows.complete") as models:
        creating = await client.call("create_model", body)
        with full("gateway.database.sessions.SamplerRows.add") as samplers:
            stack.trainer.go.set()
            await until(lambda: models and samplers)
        assert (await client.result(saving))["sampling_session_id"] == f"{session_id}:sample:5"
    assert (await client.result(creating))["model_id"] == f"{session_id}:train:1"


async def test_a_save_that_failed_fails_with_its_reason_once_the_database_is_back(
    stack: Stack, client: Client, full: Full
) -> None:
    model_id = await client.model(await client.session())
    body = {"model_id": model_id, "seq_id": 1, "path": "a"}
    await client.result(await client.call("save_weights", body))
    stack.trainer.go.clear()
    receipt = await client.call("save_weights", body | {"seq_id": 2})
    with full("gateway.database.operations.OperationRows.settle") as calls:
        stack.trainer.go.set()
        await until(lambda: calls)
    assert "exists; use another name" in (await client.result(receipt))["error"]


async def test_a_save_that_waits_for_the_database_survives_the_gateway(
    stack: Stack, client: Client, full: Full
) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    receipt = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"})
    with full("gateway.database.checkpoints.CheckpointRows.put") as calls:
        stack.trainer.go.set()
        await until(lambda: calls)
        await stack.stop_gateway()
    await stack.start_gateway()
    assert (await client.result(receipt))["path"] == f"tinker://{model_id}/weights/a"


async def test_a_recorded_sample_waits_for_the_database(stack: Stack, client: Client, full: Full) -> None:
    sampler = await client.sampling_session(await client.session())
    stack.sampler.go.clear()
    receipt = await client.call("asample", sample_body(sampler, 0, record_stability_info=True))
    with full("gateway.sampling.records.Records.add") as calls:
        stack.sampler.go.set()
        await until(lambda: calls)
    assert isinstance(await client.result(receipt), bytes)


async def test_a_bug_is_no_outage(stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    model_id = await client.model(await client.session())

    async def wrong(*_: object, **__: object) -> None:
        raise IntegrityError("INSERT", {}, Exception("NOT NULL constraint failed"))

    monkeypatch.setattr("gateway.database.checkpoints.CheckpointRows.put", wrong)
    receipt = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"})
    assert "internal error" in (await client.result(receipt))["error"]
    caplog.clear()


def of_postgres(error: type[Exception], sqlstate: str) -> DBAPIError:
    cause = error("words")
    cause.sqlstate = sqlstate  # type: ignore[attr-defined]
    return DBAPIError("INSERT", {}, cause)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionRefusedError(), True),
        (NoConnection("pool"), True),
        (OperationalError("INSERT", {}, Exception("database is locked")), True),
        (asyncpg.CannotConnectNowError("it is starting up"), True),
        (asyncpg.TooManyConnectionsError("words"), True),
        (of_postgres(Exception, asyncpg.DiskFullError.sqlstate), True),
        (of_postgres(Exception, asyncpg.AdminShutdownError.sqlstate), True),
        (of_postgres(Exception, asyncpg.ReadOnlySQLTransactionError.sqlstate), True),
        (DBAPIError("INSERT", {}, Exception("closed"), connection_invalidated=True), True),
        (IntegrityError("INSERT", {}, Exception("twice")), False),
        (of_postgres(Exception, asyncpg.UndefinedTableError.sqlstate), False),
        (of_postgres(Exception, asyncpg.NumericValueOutOfRangeError.sqlstate), False),
        (DBAPIError("INSERT", {}, Exception("an int is required")), False),
        (ValueError("words"), False),
    ],
)
def test_temporary_errors_are_told_from_lasting_ones(error: Exception, *, passes: bool) -> None:
    assert is_outage(error) is passes


def unreachable() -> None:
    raise ConnectionRefusedError("nobody listens")


async def test_a_database_that_nobody_serves_is_an_outage() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    database = Database(f"postgresql+asyncpg://user@{address}/tinsmith", Metrics())
    with pytest.raises(DatabaseUnusable):
        async with database.begin() as db:
            await db.execute(select(1))
    await database.close()


async def test_a_request_that_needs_a_database_that_is_away_is_to_come_again(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stack.gateway.store, "_new", unreachable)
        for path in ("training_runs", "sessions/unknown", "checkpoints"):
            answer = await client.get(f"/api/v1/{path}")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "database cannot be used at the moment" in answer.json()["detail"]
    assert (await client.get("/api/v1/training_runs")).status_code == 200
    assert "nobody listens" in caplog.text
    assert "Traceback" not in caplog.text
    caplog.clear()


@pytest.mark.parametrize("part", ["ledger", "dashboard"])
async def test_write_behind_goes_on_after_an_outage(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    monkeypatch.setattr("gateway.database.write_behind.FLUSH_S", 0.01)
    await stack.restart_gateway()
    gateway, flushes = stack.gateway, 0
    behind = {"ledger": gateway.ledger.behind, "dashboard": gateway.dashboard.behind}[part]

    async def fail(**_: object) -> None:
        nonlocal flushes
        flushes += 1
        async with gateway.store.begin():
            pass

    monkeypatch.setattr(behind, "flush", fail)
    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "_new", unreachable)
        await until(lambda: flushes > 2)
    before = flushes
    await until(lambda: flushes > before + 2)
    assert "it is tried again" in caplog.text
    caplog.clear()


async def test_a_transaction_that_is_cut_off_at_any_moment_locks_nothing(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the garbage collector has its cursor, whose statement is not at its end."""
    assert stack.server is not None
    store = stack.server.app.state.gateway.store

    async def write() -> None:
        async with store.begin() as db:
            await db.execute(insert(Setting).values(name="cut off", value="x").returning(Setting.value))
            await db.execute(select(Setting))
            await db.rollback()

    def lock() -> None:
        with closing(sqlite3.connect(stack.state_dir / DATABASE, timeout=5, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")

    gc.disable()
    try:
        for moment in range(100):
            writing = asyncio.create_task(write())
            await asyncio.sleep(4e-5 * moment)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await asyncio.to_thread(lock)
    finally:
        gc.enable()
    caplog.clear()  # SQLAlchemy says which it could not roll back in good order


@pytest.mark.parametrize("is_shared", [False, True], ids=["one gateway", "several"])
async def test_an_outage_under_load_takes_bounded_memory_and_loses_nothing_billed(
    is_shared: bool,
    stack: Stack,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(stack.gateway.store, "is_shared", is_shared)
    model_id = await client.model(await client.session())
    gateway = stack.gateway
    assert isinstance(await client.result((await client.forward_backward(model_id, 1)).json()), bytes)
    await gateway.ledger.flush()
    await gateway.dashboard.flush()
    bounds = {"points": 6, "rows": 8, "trained": 20}
    monkeypatch.setattr("gateway.dashboard.history._MAX_WAITING", bounds["points"])
    monkeypatch.setattr("gateway.tenants.ledger._MAX_SPANS", bounds["rows"])
    monkeypatch.setattr("gateway.tenants.ledger._MAX_TRAINED", bounds["trained"])
    ledger, history = gateway.ledger, gateway.dashboard.history
    num_accepted = 0
    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "_new", unreachable)
        while (reply := await client.forward_backward(model_id, num_accepted + 2)).status_code == 200:
            num_accepted += 1
            assert num_accepted <= bounds["trained"], "the bound holds"
            assert isinstance(await client.result(reply.json()), bytes)
            with pytest.raises(DatabaseUnusable):
                await gateway.ledger.flush()
            with pytest.raises(DatabaseUnusable):
                await gateway.dashboard.flush()
            assert len(history._waiting) <= bounds["points"]
            columns = set(MetricPoint.__table__.columns.keys())
            assert all(each.keys() == columns for each in history._waiting), "no answers"
            assert len(ledger._gathered.spans) + len(ledger._batch.spans) <= 2 * bounds["rows"]
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert f"the usage of {bounds['trained']} training operations waits" in reply.json()["detail"]
        assert num_accepted == bounds["trained"]
    await gateway.ledger.flush()
    await gateway.dashboard.flush()
    async with gateway.store.begin() as db:
        billed = await db.scalar(select(func.sum(HourlyUsage.amount)).where(HourlyUsage.kind == "training"))
    assert billed == 3 * (1 + num_accepted)
    shown = await history.read(model_id)
    newest = range(num_accepted - bounds["points"] + 2, num_accepted + 2)
    assert shown["seq"] == [1, *newest]
    dropped = (await client.get("/metrics")).text
    assert f'gateway_dropped_rows_total{{kind="point"}} {float(num_accepted - bounds["points"])}' in dropped
    assert 'gateway_dropped_rows_total{kind="span"}' in dropped
    again = await client.forward_backward(model_id, num_accepted + 2)
    assert isinstance(await client.result(again.json()), bytes)
    caplog.clear()
