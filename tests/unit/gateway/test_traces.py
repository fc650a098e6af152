from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.unit.gateway.stack import Client, Stack
from tests.unit.gateway.test_downloads import fetch
from tests.unit.gateway.test_runs import get

pytestmark = pytest.mark.usefixtures("short_flushes")

BEGIN = 1_800_000_000.0


def span(session_id: str, track: str, begin: float, end: float, **facts: Any) -> dict[str, Any]:
    """Times count from BEGIN."""
    for name in ("started_at", "computed_at"):
        facts[name] = BEGIN + facts[name] if name in facts else None
    values = {"name": "asample", "request_id": f"{track}:{begin}", "outcome": "ok", "num_tokens": 3} | facts
    return {"session_id": session_id, "track": track, "submitted_at": BEGIN + begin, "ended_at": BEGIN + end, **values}


async def trace_of(client: Client, session_id: str) -> list[dict[str, Any]]:
    exported = await get(client, f"sessions/{session_id}/trace_export")
    assert exported["status"] == "ready"
    reply = await fetch(exported["url"])
    assert reply.status_code == 200
    found = reply.json()
    assert found["otherData"]["session_id"] == session_id
    return found["traceEvents"]


def slices(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


async def test_each_track_is_a_thread_of_the_service_that_worked(stack: Stack, client: Client) -> None:
    assert stack.server is not None
    ledger = stack.server.app.state.gateway.ledger
    session_id = await client.session()
    model, sampler = f"{session_id}:train:0", f"{session_id}:sample:0"
    ledger.span(**span(session_id, model, 0, 4, name="forward_backward", started_at=1, computed_at=3))
    ledger.span(**span(session_id, model, 4, 5, name="optim_step", outcome="user"))
    ledger.span(**span(session_id, sampler, 2, 3))
    ledger.span(**span("another", "another:train:0", 2, 3))
    events = await trace_of(client, session_id)
    names = {
        kind: {(event["pid"], event.get("tid")): event["args"]["name"] for event in events if event["name"] == kind}
        for kind in ("process_name", "thread_name")
    }
    assert set(names["process_name"].values()) == {"gateway", "trainer", "sampler"}
    assert sorted(names["thread_name"].values()) == sorted([model, sampler])
    for event in slices(events, "request"):
        service = names["process_name"][event["pid"], None]
        assert service == ("sampler" if event["name"] == "asample" else "trainer")
    first, _, step = slices(events, "request")
    assert (first["name"], first["ts"], first["dur"]) == ("forward_backward", BEGIN * 1e6, 4e6)
    assert first["args"] == {"request_id": f"{model}:0", "outcome": "ok", "num_tokens": 3}
    assert step["args"]["outcome"] == "user"
    (compute,) = slices(events, "compute")
    assert (compute["ts"], compute["dur"]) == ((BEGIN + 1) * 1e6, 2e6)
    assert (compute["pid"], compute["tid"]) == (first["pid"], first["tid"])


async def test_requests_that_overlap_lie_on_threads_of_their_own(stack: Stack, client: Client) -> None:
    assert stack.server is not None
    session_id = await client.session()
    sampler = f"{session_id}:sample:0"
    for begin, end in ((0, 10), (1, 3), (2, 5), (3, 4), (11, 12)):
        stack.server.app.state.gateway.ledger.span(**span(session_id, sampler, begin, end))
    events = await trace_of(client, session_id)
    threads: dict[int, list[tuple[float, float]]] = {}
    for event in slices(events, "request"):
        threads.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 3
    for intervals in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(intervals))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == [sampler, f"{sampler} (2)", f"{sampler} (3)"]


async def test_work_leaves_spans_and_they_are_forgotten_in_time(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    await client.result((await client.forward_backward(run_id, 1)).json())
    requests = slices(await trace_of(client, session_id), "request")
    assert [event["args"]["request_id"] for event in requests] == [f"{run_id}:0", f"{run_id}:1"]
    assert all(event["dur"] > 0 for event in requests)
    await stack.restart_gateway(span_retention_s=0.001)
    assert stack.server is not None
    await stack.server.app.state.gateway.reaper.forgetting.forget()
    assert slices(await trace_of(client, session_id), "request") == []


async def test_a_long_session_is_read_in_pages(stack: Stack, client: Client) -> None:
    assert stack.server is not None
    gateway = stack.server.app.state.gateway
    session_id = await client.session()
    for n in range(2500):
        gateway.ledger.span(**span(session_id, f"{session_id}:train:0", n // 2, n // 2 + 0.5, request_id=str(n)))
    requests = slices(await trace_of(client, session_id), "request")
    assert [event["args"]["request_id"] for event in requests] == [str(n) for n in range(2500)]
