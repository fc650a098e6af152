from __future__ import annotations

import asyncio
import time

import pytest

from tests.unit.gateway.stack import Client, Stack, sample_body

pytestmark = pytest.mark.gateway(reap_interval_s=0.2)


async def test_a_repeated_create_session_gives_the_same_session(client: Client) -> None:
    headers = {"x-idempotency-key": "k"}
    replies = await asyncio.gather(*[client.post("/api/v1/create_session", json={}, headers=headers) for _ in range(3)])
    assert len({reply.json()["session_id"] for reply in replies}) == 1
    assert await client.session() != await client.session()


async def test_the_first_finish_wins_and_frees_the_session(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    sampler_id = await client.sampling_session(session_id)
    await client.call("session_heartbeat", {"session_id": session_id})
    stack.sampler.go.clear()
    running = await client.call("asample", sample_body(sampler_id, 0))

    for reason in ("success", "errored"):
        await client.call(f"sessions/{session_id}/finish", {"reason": {"type": reason}, "detail": None})
    detail = (await client.call("session_heartbeat", {"session_id": session_id}, status=410))["detail"]
    assert "success" in detail
    assert "has ended" in (await client.result(running))["error"]
    async with asyncio.timeout(10):
        await stack.trainer.deletion.wait()
    assert stack.trainer.deleted_models == [model_id]
    failure = await client.result((await client.forward_backward(model_id, 1)).json())
    assert failure["category"] == "user"
    failure = await client.result(await client.call("asample", sample_body(sampler_id, 1)))
    assert "has ended" in failure["error"]
    create = {"session_id": session_id, "model_seq_id": 1, "base_model": "x", "lora_config": {"rank": 8}}
    assert "has ended" in (await client.call("create_model", create, status=400))["detail"]


async def test_a_finish_lets_accepted_work_end(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    stack.trainer.go.clear()
    receipt = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "last"})
    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    stack.trainer.go.set()
    assert (await client.result(receipt))["path"] == f"tinker://{model_id}/weights/last"
    async with asyncio.timeout(10):
        await stack.trainer.deletion.wait()


async def test_releasing_one_model_leaves_those_whose_id_begins_with_its_own(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    first, tenth = await client.model(session_id, seq=1), await client.model(session_id, seq=10)
    stack.trainer.go.clear()
    receipt = await client.call("save_weights", {"model_id": tenth, "seq_id": 1, "path": "last"})
    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    async with asyncio.timeout(10):
        await stack.trainer.deletion.wait()
    assert stack.trainer.deleted_models == [first]
    stack.trainer.go.set()
    assert (await client.result(receipt))["path"] == f"tinker://{tenth}/weights/last"


async def test_a_text_that_no_database_keeps_is_refused_by_field(client: Client) -> None:
    body = {"type": "create_session", "display_name": "a\0b"}
    assert "display_name" in (await client.call("create_session", body, status=400))["detail"]


async def test_unknown_sessions(client: Client) -> None:
    await client.call("session_heartbeat", {"session_id": "x"}, status=404)
    await client.call("sessions/x/finish", {"reason": {"type": "success"}}, status=404)


async def test_heartbeats_are_written_all_at_once(stack: Stack, client: Client) -> None:
    sessions = [await client.session() for _ in range(3)]
    for session_id in sessions:
        await client.call("session_heartbeat", {"session_id": session_id})
    assert stack.server is not None
    store = stack.server.app.state.gateway.store
    await store.sessions.heartbeats.flush()
    for session_id in sessions:
        row = await store.sessions.get(session_id)
        assert row.last_seen_at > row.created_at


@pytest.mark.gateway(session_timeout_s=0.5)
async def test_a_silent_session_is_ended(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    async with asyncio.timeout(10):
        await stack.trainer.deletion.wait()
    assert stack.trainer.deleted_models == [model_id]
    detail = (await client.call("session_heartbeat", {"session_id": session_id}, status=410))["detail"]
    assert "expired" in detail


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
@pytest.mark.gateway(session_timeout_s=60.0)
async def test_a_machine_that_slept_and_a_clock_that_was_set_end_no_session(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Sessions whose clients are gone end after one more timeout, also where the clock goes back."""
    assert stack.server is not None
    reaper, now = stack.server.app.state.gateway.reaper, time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    alive, gone = [await client.session() for _ in range(2)]
    await client.model(alive)
    await reaper.end_silent_sessions()
    now += jump_s
    await reaper.end_silent_sessions()
    await client.call("session_heartbeat", {"session_id": gone})
    for _ in range(7):
        now += 10
        await client.call("session_heartbeat", {"session_id": alive})
        await reaper.end_silent_sessions()
    await client.call("session_heartbeat", {"session_id": alive})
    await client.call("session_heartbeat", {"session_id": gone}, status=410)


async def test_a_session_that_has_ended_trains_nothing_though_its_models_are_not_freed_yet(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("gateway.reaper.Reaper.release_models", never)
    session_id = await client.session()
    model_id = await client.model(session_id)
    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    error = await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"}))
    assert (error["category"], "its session has ended" in error["error"]) == ("user", True)
    assert list(stack.trainer.models[model_id].requests) == [0]
