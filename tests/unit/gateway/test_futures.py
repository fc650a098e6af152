from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import select

from gateway.database.tables.history import Span
from gateway.database.tables.samples import SampleMark
from tests.unit.gateway.stack import Client, Stack, sample_body
from tinsmith.rpc.times import duration
from tinsmith.v1 import sampler_pb2, types_pb2


async def completions(client: Client, sampler_id: str, cursor: int, *, status: int = 200, **fields: Any) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": sampler_id}
    clone = fields.pop("clone", 0)
    body = {"target": target | {"cloned_sampler_id": clone}, "prev_cursor": cursor} | fields
    return await client.call("retrieve_futures", body, status=status)


def finished(receipt: Any) -> dict[str, Any]:
    return {"state": "finished", "request_id": receipt["request_id"], "response_payload_uncompressed_size": 54}


async def sampler_of(client: Client) -> str:
    return await client.sampling_session(await client.session())


async def sample(client: Client, sampler_id: str, seq_id: int, **fields: Any) -> Any:
    return await client.call("asample", sample_body(sampler_id, seq_id, **fields))


# Large answers


@pytest.mark.gateway(metadata_only_bytes=40)
async def test_a_large_answer_is_announced_to_those_who_allow_it(client: Client) -> None:
    receipt = await sample(client, await sampler_of(client), 0)
    ask = {"request_id": receipt["request_id"]}
    payload = await client.result(receipt)
    metadata = await client.call("retrieve_future", ask | {"allow_metadata_only": True})
    assert metadata == {"status": "complete_metadata", "response_payload_size": len(payload)}
    reply = await client.post(
        "/api/v1/retrieve_future",
        json=ask | {"allow_metadata_only": False},
        headers={"accept": "application/x-protobuf"},
    )
    assert reply.content == payload
    small = await client.call("asample", sample_body("nobody", 0))
    assert "error" in await client.call(
        "retrieve_future", {"request_id": small["request_id"], "allow_metadata_only": True}
    )


# Many samples at once


async def test_completions_are_a_list_that_can_be_read_again(stack: Stack, client: Client) -> None:
    sampler_id = await sampler_of(client)
    first, second = [await sample(client, sampler_id, seq_id) for seq_id in (0, 1)]
    await client.result(first)
    await client.result(second)
    page = {"completions": [finished(first), finished(second)], "cursor": 2}
    assert await completions(client, sampler_id, 0, timeout=0) == page
    other = await sample(client, sampler_id, 3 * 10**9)
    await client.result(other)
    stack.sampler.go.clear()
    third = await sample(client, sampler_id, 2)
    assert await completions(client, sampler_id, 2, timeout=0) == {"completions": [], "cursor": 2}
    waiting = asyncio.create_task(completions(client, sampler_id, 2))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    stack.sampler.go.set()
    assert await waiting == {"completions": [finished(third)], "cursor": 3}
    assert await completions(client, sampler_id, 2, timeout=0) == {"completions": [finished(third)], "cursor": 3}
    assert await completions(client, sampler_id, 3, timeout=0) == {"completions": [], "cursor": 3}
    assert (await completions(client, sampler_id, 0, timeout=0))["cursor"] == 3
    refused = await sample(client, sampler_id, 3, num_samples=-1)
    failed = {"state": "failed", "request_id": refused["request_id"]}
    assert await completions(client, sampler_id, 3) == {"completions": [failed], "cursor": 4}
    assert await completions(client, sampler_id, 0, clone=3) == {"completions": [finished(other)], "cursor": 1}


async def test_clients_that_never_sample_leave_nothing(stack: Stack, client: Client) -> None:
    sampler_id = await sampler_of(client)
    assert stack.server is not None
    store, kept = stack.server.app.state.gateway.store, stack.server.app.state.gateway.sampling.completions
    for clone in range(1, 201):
        page = await completions(client, sampler_id, 7, clone=clone, timeout=0)
        assert page == {"completions": [], "cursor": 7}
    assert (len(kept._samples), len(kept._lists)) == (0, 0)
    async with store.begin() as db:
        assert list(await db.scalars(select(SampleMark))) == []
    # A poll that came before the first sample hears of it.
    waiting = asyncio.create_task(completions(client, sampler_id, 0, clone=5))
    await asyncio.sleep(0.05)
    receipt = await sample(client, sampler_id, 5 * 10**9)
    assert await waiting == {"completions": [finished(receipt)], "cursor": 1}
    # And one whose session ends, of the end.
    waiting = asyncio.create_task(completions(client, sampler_id, 0, clone=6, status=410))
    await asyncio.sleep(0.05)
    await client.call(f"sessions/{sampler_id.partition(':')[0]}/finish", {"reason": {"type": "success"}})
    await waiting


async def test_a_first_sample_that_ends_while_a_poll_reads_the_database_is_reported(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler_id = await sampler_of(client)
    assert stack.gateway is not None
    samplers = stack.gateway.store.samplers
    has_read, go_on, read = asyncio.Event(), asyncio.Event(), samplers.mark

    async def slow(*target: Any) -> Any:
        monkeypatch.setattr(samplers, "mark", read)
        mark = await read(*target)
        has_read.set()
        await go_on.wait()
        return mark

    monkeypatch.setattr(samplers, "mark", slow)
    waiting = asyncio.create_task(completions(client, sampler_id, 0, timeout=0))
    await has_read.wait()
    receipt = await sample(client, sampler_id, 0)
    await client.result(receipt)
    go_on.set()
    await waiting
    assert await completions(client, sampler_id, 0, timeout=0) == {"completions": [finished(receipt)], "cursor": 1}


async def test_samples_of_more_clients_than_are_kept_in_memory_are_found_again(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sampling.samples._MAX_TARGETS", 3)
    sampler_id = await sampler_of(client)
    receipts = [await sample(client, sampler_id, clone * 10**9) for clone in range(8)]
    for receipt in receipts:
        await client.result(receipt)
    assert stack.server is not None
    kept = stack.server.app.state.gateway.sampling.completions
    assert len(kept._samples) == 3
    for clone in (0, 7):
        told = [each["request_id"] for each in (await completions(client, sampler_id, 0, clone=clone))["completions"]]
        assert receipts[clone]["request_id"] in told


_LAST_CLONE = (2**63 - 1) // 10**9


@pytest.mark.parametrize("clone", [_LAST_CLONE + 1, 2**53 - 1, 2**63])
async def test_a_clone_id_that_no_seq_id_has_is_refused_by_name(client: Client, clone: int) -> None:
    refused = await completions(client, await sampler_of(client), 0, status=400, clone=clone)
    assert "target.cloned_sampler_id" in refused["detail"]
    assert str(_LAST_CLONE) in refused["detail"]
    assert f"{clone}" in refused["detail"]


async def test_the_last_clone_id_and_seq_id_can_be_used(client: Client) -> None:
    sampler_id = await sampler_of(client)
    receipt = await sample(client, sampler_id, 2**63 - 1)
    await client.result(receipt)
    told = (await completions(client, sampler_id, 0, clone=_LAST_CLONE))["completions"]
    assert finished(receipt) in told
    assert (await client.post("/api/v1/asample", json=sample_body(sampler_id, 2**63))).status_code == 400


@pytest.mark.parametrize("number", ["9" * 20, str(2**63), "9" * 5000, "\u0664"])
async def test_request_ids_with_numbers_that_nothing_has_are_unknown(client: Client, number: str) -> None:
    session_id = await client.session()
    sampler_id, model_id = await client.sampling_session(session_id), await client.model(session_id)
    for begin in (sampler_id, model_id, session_id):
        assert (await client.poll(f"{begin}:{number}")).status_code == 410
        assert await client.call("cancel_future", {"request_id": f"{begin}:{number}"}) == {}
        await completions(client, sampler_id, 0, timeout=0, retrieved_request_ids=[f"{begin}:{number}"])


async def test_an_answer_that_the_client_has_is_dropped(stack: Stack, client: Client) -> None:
    sampler_id = await sampler_of(client)
    mine, other = await sample(client, sampler_id, 0), await sample(client, sampler_id, 1)
    await client.result(mine)
    await client.result(other)
    model_id = await client.model(await client.session())
    retrieved = [mine["request_id"], f"{model_id}:0", "nonsense"]
    await completions(client, sampler_id, 0, timeout=0, retrieved_request_ids=retrieved)
    assert (await client.poll(mine["request_id"])).status_code == 410
    assert (await client.poll(other["request_id"])).status_code == 200
    assert (await client.poll(f"{model_id}:0")).status_code == 200


@pytest.mark.gateway(result_cache_bytes=1)
async def test_an_answer_that_had_to_go_is_reported_and_then_gone(client: Client) -> None:
    sampler_id = await sampler_of(client)
    await completions(client, sampler_id, 0, timeout=0)
    receipts = [await sample(client, sampler_id, seq_id) for seq_id in (0, 1)]
    found: list[Any] = []
    while len(found) < 2:
        found += (await completions(client, sampler_id, len(found)))["completions"]
    assert {each["request_id"] for each in found} == {receipt["request_id"] for receipt in receipts}
    assert sorted([(await client.poll(receipt["request_id"])).status_code for receipt in receipts]) == [200, 410]


async def test_a_restart_tells_clients_what_it_has_lost(stack: Stack, client: Client) -> None:
    sampler_id = await sampler_of(client)
    done = await sample(client, sampler_id, 0)
    assert await completions(client, sampler_id, 0) == {"completions": [finished(done)], "cursor": 1}
    stack.sampler.go.clear()
    lost = await sample(client, sampler_id, 1)
    await stack.restart_gateway()
    stack.sampler.go.set()
    page = await completions(client, sampler_id, 1)
    assert {"state": "failed", "request_id": lost["request_id"]} in page["completions"]
    assert page["cursor"] == 1 + len(page["completions"])
    assert (await client.poll(lost["request_id"])).status_code == 410
    again = await sample(client, sampler_id, 2)
    assert finished(again) in (await completions(client, sampler_id, page["cursor"]))["completions"]


async def test_a_restart_also_tells_of_what_came_out_of_order(stack: Stack, client: Client) -> None:
    sampler_id = await sampler_of(client)
    stack.sampler.go.clear()
    lost = [await sample(client, sampler_id, seq_id) for seq_id in (3, 0, 2)]
    await stack.restart_gateway()
    failed = [each["request_id"] for each in (await completions(client, sampler_id, 0))["completions"]]
    assert {receipt["request_id"] for receipt in lost} <= set(failed)


async def test_a_page_of_completions_is_bounded(stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.sampling.samples.MAX_PAGE", 2)
    sampler_id = await sampler_of(client)
    await asyncio.gather(*[sample(client, sampler_id, seq_id) for seq_id in range(5)])
    cursor, ids = 0, []
    while len(ids) < 5:
        page = await completions(client, sampler_id, cursor)
        assert len(page["completions"]) <= 2
        ids += [each["request_id"] for each in page["completions"]]
        cursor = page["cursor"]
    assert sorted(ids) == [f"{sampler_id}:{seq_id}" for seq_id in range(5)]


async def test_an_answer_that_nobody_reads_is_not_kept_for_ever(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sampling.samples._MAX_OPEN", 3)
    monkeypatch.setattr("gateway.sampling.samples._MAX_SETTLED", 2)
    sampler_id = await sampler_of(client)
    await completions(client, sampler_id, 0, timeout=0)
    for seq_id in range(4):
        await client.result(await sample(client, sampler_id, seq_id))
    receipts = [await sample(client, sampler_id, seq_id) for seq_id in range(4, 8)]
    assert stack.server is not None
    known = stack.server.app.state.gateway.sampling.completions
    (samples,) = known._samples.values()
    assert (len(samples.open), len(samples.settled)) == (3, 2)
    assert all(len(each.request_ids) <= 3 for each in known._lists.values())
    page = {"completions": [], "cursor": 100}
    while finished(receipts[-1]) not in page["completions"]:
        start = page["cursor"]
        page = await completions(client, sampler_id, start)
        assert page["cursor"] == start + len(page["completions"])


async def test_completions_of_unknown_and_ended_sampling_sessions_do_not_hang(stack: Stack, client: Client) -> None:
    await completions(client, "nobody:sample:0", 0, status=404)
    await completions(client, "nobody:sample:0", -1, status=400)
    session_id = await client.session()
    sampler_id = await client.sampling_session(session_id)
    waiting = asyncio.create_task(completions(client, sampler_id, 0, status=410))
    await asyncio.sleep(0.05)
    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    await asyncio.wait_for(waiting, 2)
    await completions(client, sampler_id, 0, status=410)


async def test_a_stop_ends_the_polls_for_completions(stack: Stack, client: Client) -> None:
    sampler_id = await sampler_of(client)
    waiting = asyncio.create_task(completions(client, sampler_id, 0))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(stack.stop_gateway(), 2)
    assert await waiting == {"completions": [], "cursor": 0}


@pytest.mark.gateway(sample_use_retrieve_futures=False, sample_cancel_enabled=False, custom_loss_server_side=False)
async def test_an_ability_that_the_operator_turns_off_is_not_offered(client: Client) -> None:
    flags = await client.call("client/config", {"sdk_version": "0.38.0"})
    assert (flags["sample_use_retrieve_futures"], flags["custom_loss_server_side"]) == (False, False)
    assert await client.call("client/dynamic_config", {}) == {"sample_cancel_enabled": False}


async def test_busy_models_are_those_with_operations_in_work(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id, _ = await client.model(session_id), await client.model(session_id, seq=1)
    sampler_id = await client.sampling_session(session_id)
    assert stack.gateway.futures.busy_models() == []
    stack.trainer.go.clear()
    stack.sampler.go.clear()
    receipts = [(await client.forward_backward(model_id, 1)).json(), await sample(client, sampler_id, 0)]
    assert stack.gateway.futures.busy_models() == [model_id]
    stack.trainer.go.set()
    stack.sampler.go.set()
    for receipt in receipts:
        await client.result(receipt)
    assert stack.gateway.futures.busy_models() == []


# Cancelling


async def test_a_cancelled_sample_stops_at_the_sampler(stack: Stack, client: Client) -> None:
    sampler_id = await sampler_of(client)
    stack.sampler.go.clear()
    receipt = await sample(client, sampler_id, 0)
    polling = asyncio.create_task(client.result(receipt))
    await stack.sampler.called.wait()
    cancel = {"request_id": receipt["request_id"]}
    assert await client.call("cancel_future", cancel) == {}
    failure = await polling
    assert (failure["category"], "cancelled" in failure["error"]) == ("user", True)
    await stack.sampler.cancelled.wait()
    assert await client.call("cancel_future", cancel) == {}
    assert await client.result(receipt) == failure
    stack.sampler.go.set()
    await client.result(await sample(client, sampler_id, 1))


async def test_only_samples_in_work_can_be_cancelled(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    training = (await client.forward_backward(model_id, 1)).json()
    assert await client.call("cancel_future", training) == {}
    assert await client.call("cancel_future", {"request_id": "unknown"}) == {}
    stack.trainer.go.set()
    assert isinstance(await client.result(training), bytes)
    done = await sample(client, await sampler_of(client), 0)
    payload = await client.result(done)
    await client.call("cancel_future", done)
    assert await client.result(done) == payload
    await client.call("cancel_future", {}, status=400)


# Reasons for which futures wait


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        (types_pb2.QueueStatus(running=True, reason="is computed"), "active", "is computed"),
        (
            types_pb2.QueueStatus(running=True, reason="generates", expected_time=duration(0.2)),
            "active",
            "generates (done in about 1 s)",
        ),
        (
            types_pb2.QueueStatus(position=3, expected_time=duration(12.3), reason="waits: 5120 tokens are before it"),
            "paused_capacity",
            "waits: 5120 tokens are before it (position 4, done in about 12 s)",
        ),
        (types_pb2.QueueStatus(reason="seq_id 1 has not arrived"), "active", "seq_id 1 has not arrived"),
        (
            types_pb2.QueueStatus(position=1, expected_time=duration(600), reason="waits"),
            "paused_capacity",
            "waits (position 2, done in about 10 min)",
        ),
    ],
)
@pytest.mark.gateway(long_poll_s=0.05)
async def test_a_future_says_for_what_it_waits(
    stack: Stack, client: Client, status: types_pb2.QueueStatus, state: str, reason: str
) -> None:
    model_id = await client.model(await client.session())
    sampler_id = await sampler_of(client)
    stack.trainer.status = stack.sampler.status = status
    stack.trainer.go.clear()
    stack.sampler.go.clear()
    for receipt in ((await client.forward_backward(model_id, 1)).json(), await sample(client, sampler_id, 0)):
        waiting = (await client.poll(receipt["request_id"])).json()
        assert (waiting["queue_state"], waiting["queue_state_reason"]) == (state, reason)


@pytest.mark.gateway(long_poll_s=0.05)
async def test_a_service_that_does_not_say_leaves_what_the_gateway_knows(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.futures._ASK_TIMEOUT_S", 0.05)
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    receipt = (await client.forward_backward(model_id, 1)).json()

    async def sleep(request: Any, context: Any) -> None:
        await asyncio.sleep(5)

    monkeypatch.setattr(stack.trainer, "DescribeOperation", sleep)
    await stack.trainer_backend.stop()
    await stack.trainer_backend.start()
    waiting = (await client.poll(receipt["request_id"])).json()
    assert waiting["queue_state_reason"]
    stack.trainer.go.set()


# When it ran


async def test_every_future_leaves_a_span(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    await client.result((await client.forward_backward(model_id, 1)).json())
    await client.result((await client.forward_backward(model_id, 2, loss_fn="no")).json())
    sampler_id = await client.sampling_session(session_id)
    response = sampler_pb2.SampleResponse.FromString(await client.result(await sample(client, sampler_id, 0)))
    assert len(response.sequences) == 2
    assert stack.server is not None
    gateway = stack.server.app.state.gateway
    await gateway.ledger.flush()
    async with gateway.store.begin() as db:
        spans = list(await db.scalars(select(Span).order_by(Span.span_id)))
    assert [(each.track, each.name, each.outcome, each.num_tokens) for each in spans] == [
        (model_id, "create_model", "ok", 0),
        (model_id, "forward_backward", "ok", 3),
        (model_id, "forward_backward", "user", 3),
        (sampler_id, "asample", "ok", 7),
    ]
    assert [(each.started_at, each.computed_at) for each in spans] == [(1.5, 2.5)] * 3 + [(3.5, 4.5)]
    assert all(each.session_id == session_id and each.submitted_at <= each.ended_at for each in spans)
