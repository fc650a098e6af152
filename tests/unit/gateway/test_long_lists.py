"""Lists of many rows with long notes: the event loop is free in between, and nothing is read that no answer needs."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from gateway.dashboard import points as points_module
from gateway.database import connection
from gateway.database.tables.base import Base
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.history import MetricPoint
from gateway.database.tables.sessions import Model, Session
from gateway.database.tables.tenants import AuditEvent, HourlyUsage
from gateway.tenants import billing
from tests.support.waiting import until
from tests.unit.gateway.commits import Statements
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack
from tests.unit.gateway.test_isolation import CASES, ask, things_of
from tests.unit.gateway.test_runs import get

NUM_ROWS = 4 * connection._PER_PASS
HOUR = 10
WINDOW = "starting_on=1970-01-01T10:00:00Z&ending_before=1970-01-01T11:00:00Z"
YESTERDAY = (datetime.now(UTC) - timedelta(days=1)).date()
MIDNIGHT = datetime(YESTERDAY.year, YESTERDAY.month, YESTERDAY.day, tzinfo=UTC).timestamp()
NOTES = {"k": "x" * 1000}


pytestmark = pytest.mark.usefixtures("either_database")


async def add(stack: Stack, *rows: Base) -> None:
    async with stack.gateway.store.begin() as db:
        db.add_all(rows)


def session(number: int, **columns: Any) -> Session:
    return Session(
        session_id=f"s{number}",
        owner="local",
        created_at=float(number),
        last_seen_at=0.0,
        ended_at=1.0,
        tags=["t"],
        user_metadata=NOTES,
        **columns,
    )


def run(number: int) -> Model:
    return Model(
        model_id=f"s0:train:{number}",
        session_id="s0",
        base_model=BASE_MODEL,
        optimizer="adamw",
        lora_rank=8,
        user_metadata=NOTES,
        created_at=float(number),
        released_at=1.0,
    )


def checkpoint(number: int) -> Checkpoint:
    layers = {"train_unembed": True, "train_mlp": True, "train_attn": True}
    return Checkpoint(
        path=f"tinker://s0:train:0/weights/{number}",
        location="",
        run_id="s0:train:0",
        kind="weights",
        owner="local",
        base_model=BASE_MODEL,
        version_id="",
        lora_rank=8,
        has_optimizer=True,
        step=1,
        size_bytes=1,
        created_at=float(number),
        user_metadata=NOTES,
        **layers,
    )


@asynccontextmanager
async def passes() -> AsyncIterator[Counter[tuple[int, asyncio.Task[object] | None]]]:
    """(pass of the event loop, task) -> number of rows that SQLAlchemy made for the task in the pass."""
    rows, now = Counter[tuple[int, asyncio.Task[object] | None]](), 0

    async def count() -> None:
        nonlocal now
        while True:
            now += 1
            await asyncio.sleep(0)

    def note(*_: object) -> None:
        rows[now, asyncio.current_task()] += 1

    event.listen(Base, "load", note, propagate=True)
    counting = asyncio.create_task(count())
    try:
        yield rows
    finally:
        counting.cancel()
        event.remove(Base, "load", note)


@pytest.mark.parametrize(
    "path",
    [
        "training_runs?limit=1000",
        "checkpoints?limit=1000",
        "training_runs/s0:train:0/checkpoints",
        "training_runs/s0:train:0/retention",
        pytest.param(f"audit?day={YESTERDAY}", id="audit"),
    ],
)
async def test_a_long_list_is_read_a_few_rows_at_a_time(stack: Stack, client: Client, path: str) -> None:
    await add(stack, session(0))
    await add(stack, *map(run, range(NUM_ROWS)), *map(checkpoint, range(NUM_ROWS)))
    await add(
        stack,
        *(
            AuditEvent(at=MIDNIGHT + n // 7, owner="local", category="projects", event="e", details={"n": n})
            for n in range(10 * NUM_ROWS)
        ),
    )
    async with passes() as rows:
        answer = await get(client, path)
    assert sum(rows.values()) >= NUM_ROWS
    assert max(rows.values()) <= connection._PER_PASS
    if "audit" in path:
        assert [entry["event_details"]["n"] for entry in answer["entries"]] == list(range(10 * NUM_ROWS))


def point(number: int) -> MetricPoint:
    return MetricPoint(
        run_id="s0:train:0",
        seq_id=number + 1,
        first_seq_id=number + 1,
        at=float(number),
        num_steps=1,
        num_operations=1,
        sums={"loss:mean": [1.0, 1.0, 0]},
    )


async def test_the_history_of_a_run_is_read_a_few_rows_at_a_time_and_computed_beside_the_event_loop(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 points of 15 metrics took 0.2 s of the event loop, for each dashboard that asked."""
    threads = []

    def by_steps(points: Any) -> Any:
        threads.append(threading.current_thread())
        return points_module.by_steps(points)

    monkeypatch.setattr("gateway.dashboard.history.by_steps", by_steps)
    await add(stack, session(0))
    await add(stack, run(0), *map(point, range(NUM_ROWS)))
    async with passes() as rows:
        reply = await client.get("/dashboard/api/runs/s0:train:0/history")
    assert (reply.status_code, len(reply.json()["step"])) == (200, NUM_ROWS)
    assert max(rows.values()) <= connection._PER_PASS
    assert threads
    assert threading.main_thread() not in threads


async def test_what_the_reaper_reads_of_ended_runs_and_expired_checkpoints_has_no_notes(
    stack: Stack, client: Client
) -> None:
    gateway = stack.gateway
    ended, gone = run(0), checkpoint(0)
    ended.released_at, gone.expires_at = None, 1.0
    await add(stack, session(0))
    await add(stack, ended, gone)
    statements = Statements(gateway.store)
    ((model, owner),) = await gateway.store.models.unreleased()
    assert (model.model_id, owner.ended_at) == ("s0:train:0", 1.0)
    assert [row.path for row in await gateway.store.checkpoints.expired()] == [gone.path]
    assert (await gateway.store.sessions.whose("s0"), await gateway.store.sessions.whose("s1")) == (("local", ""), None)
    asked = statements.taken()  # not those of the gateway's own reaper, which releases the model beside this test
    assert any("FROM checkpoints" in statement for statement in asked)
    assert not [statement for statement in asked if "user_metadata" in statement or "tags" in statement]
    await gateway.reaper.release_models()
    await gateway.reaper.delete_expired()
    assert await gateway.store.checkpoints.get(gone.path) is None


def usage(session_id: str, kind: str, amount: int = 1) -> HourlyUsage:
    return HourlyUsage(hour=HOUR, owner="local", session_id=session_id, base_model="m", kind=kind, amount=amount)


async def test_usage_reads_the_metadata_of_each_session_once_and_never_parses_it(stack: Stack, client: Client) -> None:
    await add(stack, session(0, project_id="p"), session(1))
    await add(stack, usage("s0", "training", 3), usage("s0", "sampling_sample", 2), usage("s1", "training"))
    await add(stack, usage("", "storage", 0))
    statements = Statements(stack.gateway.store)
    answer = await get(client, f"billing/usage/events?{WINDOW}")
    assert [event["project_id"] for event in answer["data"]] == ["p", "p", "default", None]
    assert answer["sessions"] == {"s0": {"user_metadata": NOTES}, "s1": {"user_metadata": NOTES}}
    asked = [each for each in statements.of_all if "FROM usage" in each or "FROM sessions" in each]
    of_events, _, of_notes = [each for each in asked if "FROM usage" in each or "user_metadata" in each]
    assert "user_metadata" not in of_events
    assert "tags" not in of_events
    assert "JOIN" not in of_notes


async def test_usage_holds_no_more_metadata_than_its_bound_and_leaves_out_the_longest(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(billing, "MAX_METADATA", 3000)
    sessions = [session(n) for n in range(4)]
    sessions[0].user_metadata, sessions[3].user_metadata = {"k": "x" * 2000}, {}
    await add(stack, *sessions)
    await add(stack, *(usage(f"s{n}", "training") for n in range(4)))
    answer = await get(client, f"billing/usage/events?{WINDOW}")
    assert len(answer["data"]) == 4
    assert {key: value["user_metadata"] for key, value in answer["sessions"].items()} == {
        "s1": NOTES,
        "s2": NOTES,
        "s3": None,
    }


async def test_no_get_writes(stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GET that reads the ledger waits for the ledger's own write, so that repeated GETs do not cause more of them."""
    monkeypatch.setattr("gateway.database.write_behind.FLUSH_S", 3600.0)
    await stack.restart_gateway(reap_interval_s=3600)
    gateway, session_id = stack.gateway, await things_of(client)
    await gateway.ledger.flush()
    gateway.ledger.use("training", 7, base_model="m", owner="local")
    statements = Statements(gateway.store)
    cases = [case for case in CASES if case.route.startswith("GET ")]
    asked = [(case.route, asyncio.create_task(ask(client, case, session_id))) for case in cases]
    trace = (await get(client, f"sessions/{session_id}/trace_export"))["url"]
    exporting = asyncio.create_task(client.get(trace))
    await until(lambda: sum(not task.done() for _, task in asked) == 2)
    waiting = {route.rpartition("/")[2] for route, task in asked if not task.done()}
    assert waiting == {"audit", "events"}
    assert not exporting.done()
    assert [each for each in statements.of_all if not each.startswith("SELECT")] == []
    await gateway.ledger.flush()
    statuses = {route: (await task).status_code for route, task in asked}
    assert (await exporting).status_code == 200
    assert set(statuses.values()) <= {200, 302, 404}, statuses
    assert len([status for status in statuses.values() if status == 404]) < 3, statuses
    (usage,) = [task.result() for route, task in asked if route.endswith("events")]
    assert 7 in [event["event_info"].get("token_count") for event in usage.json()["data"]]


async def test_a_get_does_not_wait_for_a_database_that_cannot_be_written(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="gateway.database.write_behind")
    gateway = stack.gateway
    gateway.ledger.use("training", 7, base_model="m", owner="local")

    async def fail() -> None:
        raise OperationalError("", None, Exception("disk full"))

    monkeypatch.setattr(gateway.ledger.behind, "_write", fail)
    assert (await get(client, f"billing/usage/events?{WINDOW}"))["data"] == []
    monkeypatch.undo()
