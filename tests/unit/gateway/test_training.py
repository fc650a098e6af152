from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import httpx
import pytest
import zstandard

from gateway.tenants.limits import Limits
from tests.unit.gateway.stack import BASE_MODEL, GIVEN_UP, Client, Stack, batch
from tinsmith.errors import RateLimited
from tinsmith.v1 import trainer_pb2, types_pb2

PROTOBUF = {"content-type": "application/x-protobuf"}


async def test_receipts_come_at_once_and_execution_is_in_order(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    for seq_id in (3, 2, 1):
        reply = await client.forward_backward(model_id, seq_id)
        assert reply.json() == {"request_id": f"{model_id}:{seq_id}", "model_id": model_id}
    for seq_id in (3, 2, 1):
        answer = await client.result({"request_id": f"{model_id}:{seq_id}"})
        assert trainer_pb2.ForwardBackwardResponse.FromString(answer).metrics["loss:sum"] == 1
    assert stack.trainer.orders[model_id] == [0, 1, 2, 3]


async def test_a_repeat_runs_once_and_a_conflict_is_refused(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    replies = await asyncio.gather(*[client.forward_backward(model_id, 1) for _ in range(3)])
    assert {reply.json()["request_id"] for reply in replies} == {f"{model_id}:1"}
    conflict = await client.forward_backward(model_id, 1, loss_fn="ppo")
    assert conflict.status_code == 422
    assert "seq_id 1" in conflict.json()["detail"]
    stack.trainer.go.set()
    assert b"loss:sum" in await client.result({"request_id": f"{model_id}:1"})
    assert (await client.forward_backward(model_id, 1)).status_code == 200
    assert (await client.forward_backward(model_id, 1, loss_fn="ppo")).status_code == 422
    assert b"loss:sum" in await client.result({"request_id": f"{model_id}:1"})
    assert stack.trainer.orders[model_id] == [0, 1]


async def test_a_repeat_may_have_its_fields_in_another_order(stack: Stack, client: Client) -> None:
    """Protobuf gives maps no order, so a client may write a repeat in other bytes."""
    model_id = await client.model(await client.session())
    ids = trainer_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=1).SerializeToString()
    rest = batch("", 0).SerializeToString()
    stack.trainer.go.clear()
    for body in (ids + rest, rest + ids):
        reply = await client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF)
        assert reply.json() == {"request_id": f"{model_id}:1", "model_id": model_id}
    stack.trainer.go.set()
    assert b"loss:sum" in await client.result({"request_id": f"{model_id}:1"})
    assert (await client.post("/api/v1/forward_backward", content=rest + ids, headers=PROTOBUF)).status_code == 200
    assert stack.trainer.orders[model_id] == [0, 1]


async def test_other_bytes_are_a_conflict_once_the_trainer_has_forgotten_a_batch(stack: Stack, client: Client) -> None:
    """The trainer cannot compare them then, and the answer that the gateway keeps is of the first bytes."""
    model_id = await client.model(await client.session())
    ids = trainer_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=1).SerializeToString()
    rest = batch("", 0).SerializeToString()
    receipt = await client.post("/api/v1/forward_backward", content=ids + rest, headers=PROTOBUF)
    await client.result(receipt.json())
    stack.trainer.forgotten.add(1)
    refused = await client.post("/api/v1/forward_backward", content=rest + ids, headers=PROTOBUF)
    assert (refused.status_code, "seq_id 1 of model" in refused.json()["detail"]) == (422, True)
    again = await client.post("/api/v1/forward_backward", content=ids + rest, headers=PROTOBUF)
    assert again.json() == receipt.json()


@pytest.mark.parametrize("endpoint", ["optim_step", "save_weights"])
async def test_an_operation_that_comes_after_its_number_was_given_up_is_told_so(
    stack: Stack, client: Client, endpoint: str
) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.models[model_id].requests[1] = GIVEN_UP
    more = {"adam_params": {"learning_rate": 1e-3}} if endpoint == "optim_step" else {"path": "late"}
    for _ in range(2):
        refused = await client.call(endpoint, {"model_id": model_id, "seq_id": 1, **more}, status=422)
        assert "given up" in refused["detail"]
        assert "another request" not in refused["detail"]


async def test_conflict_after_a_gateway_restart_is_refused_and_the_first_answer_stays(
    stack: Stack, client: Client
) -> None:
    model_id = await client.model(await client.session())
    await client.forward_backward(model_id, 1)
    await stack.restart_gateway()
    assert (await client.forward_backward(model_id, 1, loss_fn="ppo")).status_code == 422
    assert (await client.forward_backward(model_id, 1)).status_code == 200
    assert b"loss:sum" in await client.result({"request_id": f"{model_id}:1"})


@pytest.mark.parametrize(
    ("loss_fn", "message"), [("ppo", "loss_fn: 'ppo'"), ("", "loss_fn: ''")], ids=["unknown", "empty"]
)
async def test_a_refusal_of_the_trainer_fails_the_future(client: Client, loss_fn: str, message: str) -> None:
    model_id = await client.model(await client.session())
    receipt = (await client.forward_backward(model_id, 1, loss_fn=loss_fn)).json()
    failure = await client.result(receipt)
    assert failure["category"] == "user"
    assert message in failure["error"]


@pytest.mark.parametrize(("version", "seen"), [(None, 2), ("0.38.0", 2), ("0.28.1", 2), ("0.24.1", 0)])
async def test_the_trainer_hears_which_failure_a_client_was_told_of_before_it_went_on(
    stack: Stack, client: Client, version: str | None, seen: int
) -> None:
    if version is not None:
        client.headers["x-stainless-package-version"] = version
    model_id = await client.model(await client.session())
    for seq_id, loss_fn in ((1, "cross_entropy"), (2, "ppo"), (3, "cross_entropy")):
        answer = await client.result((await client.forward_backward(model_id, seq_id, loss_fn=loss_fn)).json())
        assert (b"error" in answer if isinstance(answer, bytes) else "error" in answer) == (loss_fn == "ppo")
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 4, "adam_params": {}}))
    assert stack.trainer.failures_seen == [seen]


async def test_a_batch_whose_receipt_was_lost_and_that_was_sent_again_is_one_batch(
    stack: Stack, client: Client
) -> None:
    model_id = await client.model(await client.session())
    for seq_id, loss_fn in ((1, "ppo"), (2, "cross_entropy")):
        await client.forward_backward(model_id, seq_id, loss_fn=loss_fn)
        await client.result((await client.forward_backward(model_id, seq_id, loss_fn=loss_fn)).json())
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
    assert stack.trainer.failures_seen == [1]


async def test_a_client_that_pipelines_was_told_of_no_failure_when_it_sent_its_step(
    stack: Stack, client: Client
) -> None:
    model_id = await client.model(await client.session())
    bad = (await client.forward_backward(model_id, 1, loss_fn="ppo")).json()
    await client.result(bad)  # as an SDK asks in the background, whose user has not heard of it
    good = (await client.forward_backward(model_id, 2)).json()
    step = await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}})
    await client.result(good)
    await client.result(step)
    body = {"model_id": model_id, "seq_id": 4, "forward_backward_input": {"data": "none", "loss_fn": "ppo"}}
    await client.result(await client.call("forward_backward", body))  # which the gateway refuses itself
    await client.result((await client.forward_backward(model_id, 5)).json())
    await stack.restart_gateway()
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 6, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0, 0], "the new gateway knows of nothing"


@contextmanager
def holding_failures_back() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Gives two events: one that is set when a failure is held back, and one until which it is held back."""
    held, come = asyncio.Event(), asyncio.Event()

    async def hold(_: float) -> None:
        held.set()
        await come.wait()

    with mock.patch("tinsmith.received_answers.sleep", hold):
        yield held, come


async def test_a_failure_that_an_sdk_has_fetched_at_once_protects_what_was_sent_together_with_it(
    stack: Stack, client: Client
) -> None:
    model_id = await client.model(await client.session())
    with holding_failures_back() as (held, come):
        bad = asyncio.create_task(client.result((await client.forward_backward(model_id, 1, loss_fn="ppo")).json()))
        await asyncio.wait([bad, held_back := asyncio.create_task(held.wait())], return_when=asyncio.FIRST_COMPLETED)
        held_back.cancel()
        good = (await client.forward_backward(model_id, 2)).json()
        come.set()
        await bad
    await client.result(good)
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0]


async def test_a_client_that_leaves_before_it_has_the_failure_was_not_told_of_it(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    bad = (await client.forward_backward(model_id, 1, loss_fn="ppo")).json()
    with holding_failures_back() as (held, come):
        polling = asyncio.create_task(client.result(bad))
        await held.wait()
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await client.get("/api/v1/healthz")  # it comes after the end of the connection
        come.set()
    await client.result((await client.forward_backward(model_id, 2)).json())
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0]


async def test_a_batch_that_was_on_its_way_when_the_failure_was_told_is_protected(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    bad = (await client.forward_backward(model_id, 1, loss_fn="ppo")).json()
    body, begun, told = batch(model_id, 2).SerializeToString(), asyncio.Event(), asyncio.Event()

    async def halves() -> AsyncIterator[bytes]:
        yield body[:10]
        begun.set()
        await told.wait()
        yield body[10:]

    headers = {**PROTOBUF, "content-length": str(len(body))}
    good = asyncio.create_task(client.post("/api/v1/forward_backward", content=halves(), headers=headers))
    await begun.wait()
    await client.get("/api/v1/healthz")  # it comes after the first half
    await client.result(bad)
    told.set()
    await client.result((await good).json())
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0]


async def test_a_batch_that_waits_behind_the_poll_of_the_failure_on_its_connection_is_protected(
    stack: Stack, client: Client
) -> None:
    """HTTP/1.1 pipelining: the gateway handles a connection's requests one after the other."""
    model_id = await client.model(await client.session())
    bad = (await client.forward_backward(model_id, 1, loss_fn="ppo")).json()
    poll = json.dumps({"request_id": bad["request_id"]}).encode()
    good = batch(model_id, 2).SerializeToString()
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    for path, content_type, content in (
        ("retrieve_future", "application/json", poll),
        ("forward_backward", PROTOBUF["content-type"], good),
    ):
        head = f"POST /api/v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
    await reader.readuntil(b'"category"')
    await reader.readuntil(f'"{model_id}:2"'.encode())
    writer.close()
    await client.result({"request_id": f"{model_id}:2"})
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0]


@pytest.mark.parametrize("what", ["queue", "rate"])
async def test_a_batch_that_was_refused_for_now_is_protected_from_the_failure_that_comes_meanwhile(
    stack: Stack, client: Client, what: str
) -> None:
    model_id = await client.model(await client.session())
    bad = (await client.forward_backward(model_id, 1, loss_fn="ppo")).json()
    limits = mock.patch.object(Limits, "operation", side_effect=RateLimited("try again in 1 s", retry_after_s=1))
    with limits if what == "rate" else nullcontext():
        stack.trainer.is_full = what == "queue"
        assert (await client.forward_backward(model_id, 2)).status_code == 429
        stack.trainer.is_full = False
    await client.result(bad)
    await client.result((await client.forward_backward(model_id, 2)).json())
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0]


@pytest.mark.parametrize("what", ["batch", "step"])
async def test_a_client_that_was_told_of_a_failure_starts_afresh_with_requests_that_are_refused_for_now(
    stack: Stack, client: Client, what: str
) -> None:
    model_id = await client.model(await client.session())
    await client.result((await client.forward_backward(model_id, 1, loss_fn="ppo")).json())
    again = {"x-stainless-retry-count": "1"}
    step = {"model_id": model_id, "seq_id": 3, "adam_params": {}}
    stack.trainer.is_full = what == "batch"
    first = await client.forward_backward(model_id, 2)
    if what == "batch":
        assert first.status_code == 429
        stack.trainer.is_full = False
        first = await client.post(
            "/api/v1/forward_backward", content=batch(model_id, 2).SerializeToString(), headers=PROTOBUF | again
        )
    await client.result(first.json())
    stack.trainer.is_full = what == "step"
    reply = await client.post("/api/v1/optim_step", json=step)
    if what == "step":
        assert reply.status_code == 429
        stack.trainer.is_full = False
        reply = await client.post("/api/v1/optim_step", json=step, headers=again)
    await client.result(reply.json())
    assert set(stack.trainer.failures_seen) == {1}


@pytest.mark.parametrize("retries", ["0", "1"])
async def test_a_batch_that_an_sdk_sends_again_was_perhaps_sent_before_the_failure(
    stack: Stack, client: Client, retries: str
) -> None:
    """Its first attempt was lost before the gateway could read it."""
    model_id = await client.model(await client.session())
    await client.result((await client.forward_backward(model_id, 1, loss_fn="ppo")).json())
    headers = {**PROTOBUF, "x-stainless-retry-count": retries}
    content = batch(model_id, 2).SerializeToString()
    await client.result((await client.post("/api/v1/forward_backward", content=content, headers=headers)).json())
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
    assert stack.trainer.failures_seen == [1 if retries == "0" else 0]


async def test_batches_in_work_together_are_protected_when_they_are_sent_again_after_a_restart_of_the_gateway(
    stack: Stack, client: Client
) -> None:
    model_id = await client.model(await client.session())
    batches = ((1, "ppo"), (2, "cross_entropy"))
    for seq_id, loss_fn in batches:
        await client.forward_backward(model_id, seq_id, loss_fn=loss_fn)
    await stack.restart_gateway()
    for seq_id, loss_fn in (*batches, (4, "ppo"), (5, "cross_entropy")):
        if seq_id == 4:
            await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
        await client.result((await client.forward_backward(model_id, seq_id, loss_fn=loss_fn)).json())
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 6, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0, 4], "the new gateway has seen 4 and 5 from the beginning"


async def test_a_batch_from_before_a_restart_of_the_gateway_is_protected_from_a_failure_behind_it(
    stack: Stack, client: Client
) -> None:
    """The new gateway does not know that the client waits for the batch."""
    model_id = await client.model(await client.session())
    early = (await client.forward_backward(model_id, 1)).json()
    await stack.restart_gateway()
    for seq_id, loss_fn in ((2, "ppo"), (3, "cross_entropy")):
        await client.result((await client.forward_backward(model_id, seq_id, loss_fn=loss_fn)).json())
    await client.result(early)
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 4, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0]


async def test_a_number_that_another_operation_takes_after_it_was_refused_for_now_is_no_new_batch(
    stack: Stack, client: Client
) -> None:
    model_id = await client.model(await client.session())
    await client.result((await client.forward_backward(model_id, 1, loss_fn="ppo")).json())
    stack.trainer.is_full = True
    assert (await client.forward_backward(model_id, 2)).status_code == 429
    stack.trainer.is_full = False
    await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": 2, "path": "early"}))
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0], "no batch came after the failed one"


async def test_a_failure_that_a_client_fetches_again_is_told_then(stack: Stack, client: Client) -> None:
    """Its connection was lost with the answer, and it has sent another batch meanwhile."""
    model_id = await client.model(await client.session())
    bad = (await client.forward_backward(model_id, 1, loss_fn="ppo")).json()
    await client.result(bad)
    good = (await client.forward_backward(model_id, 2)).json()
    await client.result(bad)
    await client.result(good)
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0]


async def test_a_conflict_with_a_number_in_work_does_not_hide_that_its_client_pipelines(
    stack: Stack, client: Client
) -> None:
    model_id = await client.model(await client.session())
    receipts = [
        (await client.forward_backward(model_id, seq_id, loss_fn=loss_fn)).json()
        for seq_id, loss_fn in ((1, "ppo"), (2, "cross_entropy"))
    ]
    other = batch(model_id, 2)
    other.forward_only = True
    reply = await client.post(
        "/api/v1/forward_backward",
        content=other.SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    assert reply.status_code == 422
    for receipt in receipts:
        await client.result(receipt)
    await client.result((await client.forward_backward(model_id, 3)).json())
    await client.result(await client.call("optim_step", {"model_id": model_id, "seq_id": 4, "adam_params": {}}))
    assert stack.trainer.failures_seen == [0]


async def test_unknown_models_fail_the_future(client: Client) -> None:
    session_id = await client.session()
    for model_id in (f"{session_id}:train:7", "nonsense", "a:sample:0"):
        receipt = (await client.forward_backward(model_id, 1)).json()
        failure = await client.result(receipt)
        assert failure["category"] == "user"
        assert repr(model_id) in failure["error"]


async def test_a_refused_operation_uses_up_its_number(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    bad = {"model_id": model_id, "seq_id": 1, "optimizer_params": {"type": "sgd", "learning_rate": 0.1}}
    receipt = await client.call("optim_step", bad)
    await client.call("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": "fast"}})
    await client.call("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}})
    assert await client.result({"request_id": f"{model_id}:3"}) == {"metrics": {"grad_norm:mean": "nan"}}
    for seq_id, part in ((1, "'sgd'"), (2, "learning_rate")):
        failure = await client.result({"request_id": f"{model_id}:{seq_id}"})
        assert failure["category"] == "user"
        assert part in failure["error"]
    await stack.restart_gateway()
    assert "'sgd'" in (await client.result(receipt))["error"]


@pytest.mark.gateway(thread_body_bytes=1)
async def test_a_batch_that_the_trainer_does_not_even_read_uses_up_its_number(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    wide = batch(model_id, 1)
    chunk = types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=bytes(4)))
    wide.data[0].model_input.extend([chunk] * 140_000)
    headers = {"content-type": "application/x-protobuf"}
    for _ in range(2):
        receipt = await client.post("/api/v1/forward_backward", content=wide.SerializeToString(), headers=headers)
        refusal = await client.result(receipt.json())
        assert (refusal["category"], "has more than 131072 parts" in refusal["error"]) == ("user", True)
    await client.result((await client.forward_backward(model_id, 2)).json())
    assert stack.trainer.orders[model_id] == [0, 1, 2]


async def test_bodies_that_are_parsed_in_a_thread_do_the_same(client: Client) -> None:
    model_id = await client.model(await client.session())
    assert b"loss:sum" in await client.result((await client.forward_backward(model_id, 1)).json())
    reply = await client.post("/api/v1/forward_backward", content=b"\xff", headers=PROTOBUF)
    assert reply.status_code == 400


async def test_many_operations_wait_for_the_first(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    steps = [{"model_id": model_id, "seq_id": seq_id, "adam_params": {}} for seq_id in range(1, 131)]
    receipts = await asyncio.gather(*[client.call("optim_step", step) for step in steps[1:]])
    receipts.append(await client.call("optim_step", steps[0]))
    answers = await asyncio.gather(*[client.result(receipt) for receipt in receipts])
    assert answers == [{"metrics": {"grad_norm:mean": "nan"}}] * 130


async def test_malformed_bodies_are_refused_at_once(client: Client) -> None:
    async def send(content: bytes, **headers: str) -> httpx.Response:
        return await client.post("/api/v1/forward_backward", content=content, headers=PROTOBUF | headers)

    reply = await send(b"\xff\xff\xff")
    assert (reply.status_code, "protobuf" in reply.json()["detail"]) == (400, True)
    zstd = {"content-encoding": "zstd"}
    packed = zstandard.compress(batch("m", 1).SerializeToString())
    for broken in (b"not zstd", packed[:-4], packed + b"x"):
        reply = await send(broken, **zstd)
        assert (reply.status_code, "zstd" in reply.json()["detail"]) == (400, True)
    assert (await send(zstandard.compress(bytes(2**28)), **zstd)).status_code == 413
    unsized = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    bomb = unsized.compress(bytes(2**28)) + unsized.flush()
    assert (await send(bomb, **zstd)).status_code == 400
    assert (await send(b"", **{"content-encoding": "br"})).status_code == 400
    assert (await send(batch("", 1).SerializeToString())).status_code == 400
    assert (await send(batch("m", -1).SerializeToString())).status_code == 400
    for body in (b"", b"{", b"[1]"):
        assert (await client.post("/api/v1/optim_step", content=body)).status_code == 400


async def test_zstd_bodies_are_read(client: Client) -> None:
    model_id = await client.model(await client.session())
    body = zstandard.compress(batch(model_id, 1).SerializeToString())
    reply = await client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF | {"content-encoding": "zstd"})
    assert b"loss:sum" in await client.result(reply.json())


async def test_a_body_above_the_limit_is_refused_and_the_gateway_lives(client: Client) -> None:
    reply = await client.post("/api/v1/forward_backward", content=bytes(100 * 2**20), headers=PROTOBUF)
    assert reply.status_code == 413
    assert "max_body_bytes" in reply.json()["detail"]

    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(100):
            yield bytes(2**20)

    try:
        reply = await client.post("/api/v1/optim_step", content=chunks())
    except httpx.WriteError:
        pass  # the connection was closed while it was being written
    else:
        assert reply.status_code == 413
    assert await client.session()


@pytest.mark.gateway(submit_timeout_s=0.5)
async def test_submissions_are_refused_while_the_trainer_is_away(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    await stack.trainer_backend.stop()
    reply = await client.forward_backward(model_id, 1)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    await stack.trainer_backend.start()
    assert (await client.forward_backward(model_id, 1)).status_code == 200
    assert b"loss:sum" in await client.result({"request_id": f"{model_id}:1"})


@pytest.mark.gateway(submit_timeout_s=0.5)
async def test_submissions_are_refused_while_the_trainer_loads(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.is_loading = True
    assert (await client.forward_backward(model_id, 1)).status_code == 503
    stack.trainer.is_loading = False
    assert (await client.forward_backward(model_id, 1)).status_code == 200


@pytest.mark.gateway(max_pending_operations=2)
async def test_too_many_operations_of_one_model_get_429(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    stack.trainer.go.clear()
    assert [(await client.forward_backward(model_id, seq_id)).status_code for seq_id in (1, 2, 3)] == [200, 200, 429]
    stack.trainer.go.set()
    await client.result({"request_id": f"{model_id}:2"})
    assert (await client.forward_backward(model_id, 3)).status_code == 200


async def test_a_full_trainer_gives_429_and_takes_the_same_request_later(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.is_full = True
    reply = await client.forward_backward(model_id, 1)
    assert (reply.status_code, "256" in reply.json()["detail"]) == (429, True)
    stack.trainer.is_full = False
    assert b"loss:sum" in await client.result((await client.forward_backward(model_id, 1)).json())


async def test_a_number_that_was_too_far_ahead_can_be_sent_once_it_is_not(stack: Stack, client: Client) -> None:
    stack.trainer.max_queued_operations = 2
    model_id = await client.model(await client.session())

    async def refused(endpoint: str, seq_id: int, **fields: Any) -> None:
        receipt = await client.call(endpoint, {"model_id": model_id, "seq_id": seq_id, **fields})
        answer = await client.result(receipt)
        assert answer["category"] == "user"
        assert f"seq_id: {seq_id} is" in answer["error"]

    await refused("optim_step", 5, adam_params={"learning_rate": 1e-3})
    await refused("save_weights", 6, path="late")
    for seq_id in (1, 2, 3, 4):
        await client.result((await client.forward_backward(model_id, seq_id)).json())
    step = await client.call("optim_step", {"model_id": model_id, "seq_id": 5, "adam_params": {"learning_rate": 1e-4}})
    assert "metrics" in await client.result(step)
    save = await client.call("save_weights", {"model_id": model_id, "seq_id": 6, "path": "other"})
    assert (await client.result(save))["path"].endswith("/weights/other")


async def test_a_bug_before_the_trainer_has_it_is_an_error_at_once_and_not_remembered(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def wrong(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    model_id = await client.model(await client.session())
    with monkeypatch.context() as patch:
        patch.setattr("gateway.training.trainer_calls.TrainerCalls.accept", wrong)
        reply = await asyncio.wait_for(client.forward_backward(model_id, 1), 20)
    assert (reply.status_code, "internal error of the gateway" in reply.json()["detail"]) == (500, True)
    assert "a bug" in caplog.text
    caplog.clear()
    assert b"loss:sum" in await client.result((await client.forward_backward(model_id, 1)).json())


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.gateway(max_body_bytes=100_000)
async def test_a_body_that_is_too_large_uses_up_its_number(client: Client, compressed: bool, chunked: bool) -> None:
    model_id = await client.model(await client.session())
    large = batch(model_id, 1)
    large.data[0].model_input[0].encoded_text.tokens = random.Random(0).randbytes(400_000)
    body = large.SerializeToString()
    headers = dict(PROTOBUF)
    if compressed:
        body, headers["content-encoding"] = zstandard.compress(body), "zstd"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    content = pieces() if chunked else body
    reply = await client.post("/api/v1/forward_backward", content=content, headers=headers)
    failure = await client.result(reply.json())
    assert failure["category"] == "user"
    assert "max_body_bytes is 100000" in failure["error"]
    assert b"loss:sum" in await client.result((await client.forward_backward(model_id, 2)).json())


async def test_a_gateway_restart_is_a_delay(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    await client.forward_backward(model_id, 1)
    await client.forward_backward(model_id, 2, loss_fn="ppo")
    await stack.restart_gateway()
    polls = [asyncio.create_task(client.poll(f"{model_id}:{seq_id}")) for seq_id in (1, 2)]
    await asyncio.sleep(0.1)
    stack.trainer.go.set()
    answer, failure = await asyncio.gather(*polls)
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert "loss_fn" in failure.json()["error"]
    assert (await client.poll(f"{model_id}:0")).json() == {"type": "create_model", "model_id": model_id}


@pytest.mark.gateway(long_poll_s=0.3)
async def test_a_trainer_restart_is_a_delay(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    receipt = (await client.forward_backward(model_id, 1)).json()
    await stack.trainer_backend.stop()
    waiting = (await client.poll(receipt["request_id"])).json()
    assert waiting["type"] == "try_again"
    assert waiting["queue_state"] == "paused_capacity"
    assert "unreachable" in waiting["queue_state_reason"]
    stack.trainer.go.set()
    await stack.trainer_backend.start()
    while (reply := await client.poll(receipt["request_id"])).headers["content-type"] != "application/x-protobuf":
        assert reply.json()["type"] == "try_again"


async def test_an_operation_that_the_trainer_has_lost_fails_as_the_servers_fault(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    stack.trainer.go.clear()
    receipt = (await client.forward_backward(model_id, 1)).json()
    await stack.trainer_backend.stop()
    stack.trainer.models.clear()
    await stack.trainer_backend.start()
    failure = await client.result(receipt)
    assert failure["category"] == "server"
    assert "no operation 1" in failure["error"]


async def test_unknown_request_ids_are_gone(client: Client) -> None:
    model_id = await client.model(await client.session())
    for request_id in (f"{model_id}:5", f"{model_id}:{2**40}", "a:sample:0:0", "x", "a:train:0:1", ""):
        reply = await client.poll(request_id)
        assert reply.status_code == 410
        assert repr(request_id) in reply.json()["detail"]


@pytest.mark.gateway(result_cache_bytes=1)
async def test_answers_that_were_evicted_come_from_the_trainer_again(client: Client) -> None:
    model_id = await client.model(await client.session())
    for seq_id in (1, 2, 3):
        await client.forward_backward(model_id, seq_id)
        await client.result({"request_id": f"{model_id}:{seq_id}"})
    assert b"loss:sum" in await client.result({"request_id": f"{model_id}:1"})


async def test_create_model_refusals(client: Client) -> None:
    session_id = await client.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    for seq, (change, part) in enumerate(
        [
            ({"base_model": "nobody/nothing"}, "'nobody/nothing'"),
            ({"lora_config": {"rank": 65}}, "rank: 65"),
            ({"lora_config": {"rank": "many"}}, "'many'"),
            ({"lora_config": {"rank": 8, "alpha": 77}}, "lora_config.alpha"),
            ({"optimizer_config": {"type": "dimuon", "version": 2}}, "optimizer_config.version"),
            ({"user_metadata": {"a": "\0"}}, "user_metadata.a"),
            ({"user_metadata": {"train_vision": "yes"}}, "user_metadata.train_vision: 'yes' is neither"),
        ]
    ):
        receipt = await client.call("create_model", body | {"model_seq_id": seq} | change)
        assert receipt["request_id"] == f"{session_id}:train:{seq}:0"
        failure = await client.result(receipt)
        assert failure["category"] == "user"
        assert part in failure["error"]
    await client.call("create_model", body | {"session_id": "nobody"}, status=404)
    await client.call("create_model", {"session_id": session_id}, status=400)


async def test_the_metadata_ask_for_adapters_of_the_tower(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    for seq, (metadata, expected) in enumerate(
        [({"train_vision": "True"}, True), ({"train_vision": "false"}, False), ({}, False)]
    ):
        model_id = await client.model(session_id, seq=seq, user_metadata=metadata)
        assert stack.trainer.models[model_id].info.lora_config.train_vision == expected


async def test_create_model_again_is_the_same_model(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    assert await client.model(session_id) == await client.model(session_id)
    assert stack.trainer.orders == {f"{session_id}:train:0": [0]}


async def test_get_info_names_the_model_that_was_asked_for(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session(), base_model="tinsmith/eight")
    info = await client.call("get_info", {"model_id": model_id})
    assert info["model_data"] == {
        "arch": "Qwen3ForCausalLM",
        "model_name": "tinsmith/eight",
        "tokenizer_id": "tinsmith/eight",
    }
    assert (info["is_lora"], info["lora_rank"], info["optimizer_config"]) == (True, 8, {"type": "adamw"})
    await stack.stop_gateway()
    await stack.start_gateway(tokenizers={"tinsmith/eight": "/models/eight"})
    assert (await client.call("get_info", {"model_id": model_id}))["model_data"]["tokenizer_id"] == "/models/eight"
    await client.call("get_info", {"model_id": "nobody"}, status=404)
