from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.gateway.stack import Client, Stack, batch
from tinsmith.v1 import trainer_pb2

NODES = [{"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}}]


def loss(session_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "custom_loss_seq_id": 0,
        "name": "mine",
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 2}],
        "graph": {"format": 1, "nodes": NODES},
        "type": "create_custom_loss",
    } | fields


async def train(client: Client, message: trainer_pb2.ForwardBackwardRequest) -> Any:
    reply = await client.post(
        "/api/v1/forward_backward",
        content=message.SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    assert reply.status_code == 200, reply.text
    return await client.result(reply.json())


def named(model_id: str, seq_id: int, **config: str) -> trainer_pb2.ForwardBackwardRequest:
    message = batch(model_id, seq_id, loss_fn="custom")
    for key, value in config.items():
        message.loss_fn_config_v2[key].text = value
    return message


async def test_a_custom_loss_is_stored_and_put_into_the_batches_that_name_it(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    receipt = await client.call("create_custom_loss", loss(session_id))
    loss_id = f"{session_id}:loss:0"
    assert receipt == {"request_id": loss_id}
    assert await client.result(receipt) == {"type": "create_custom_loss", "loss_id": loss_id}
    model_id = await client.model(session_id)
    await stack.restart_gateway()
    assert isinstance(await train(client, named(model_id, 1, loss_id=loss_id)), bytes)
    request = trainer_pb2.ForwardBackwardRequest.FromString(stack.trainer.models[model_id].requests[1])
    assert [(each.name, each.rank) for each in request.custom_loss.inputs] == [("logprobs", 1), ("weights", 2)]
    assert request.custom_loss.graph == (
        '{"format":1,"nodes":[{"op":"placeholder","name":"logprobs","target":"logprobs","args":[],"kwargs":{}}]}'
    )
    assert not request.loss_fn_config_v2
    assert await client.result(receipt) == {"type": "create_custom_loss", "loss_id": loss_id}
    assert stack.trainer.checked == ["mine"]


async def test_a_repeat_is_the_same_loss_and_another_one_is_a_conflict(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    receipts = [await client.call("create_custom_loss", loss(session_id)) for _ in range(2)]
    await stack.restart_gateway()
    receipts.append(await client.call("create_custom_loss", loss(session_id)))
    assert receipts == [{"request_id": f"{session_id}:loss:0"}] * 3
    assert stack.trainer.checked == ["mine"]
    await client.call("create_custom_loss", loss(session_id, name="other"), status=422)


async def test_a_loss_that_the_trainer_refuses_fails_its_future(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    receipt = await client.call("create_custom_loss", loss(session_id, name="bad"))
    failure = await client.result(receipt)
    assert (failure["category"], "os.system" in failure["error"]) == ("user", True)
    model_id = await client.model(session_id)
    failure = await train(client, named(model_id, 1, loss_id=receipt["request_id"]))
    assert "there is no custom loss" in failure["error"]


@pytest.mark.gateway(max_custom_losses=1)
async def test_a_session_has_a_limit_of_custom_losses(client: Client) -> None:
    session_id = await client.session()
    await client.result(await client.call("create_custom_loss", loss(session_id)))
    failure = await client.result(await client.call("create_custom_loss", loss(session_id, custom_loss_seq_id=1)))
    assert "max_custom_losses" in failure["error"]


@pytest.mark.gateway(submit_timeout_s=0.5)
async def test_a_custom_loss_waits_for_a_trainer(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    await stack.trainer_backend.stop()
    detail = (await client.call("create_custom_loss", loss(session_id), status=503))["detail"]
    assert "cannot be asked now" in detail
    await stack.restart_gateway(submit_timeout_s=10)
    creating = asyncio.create_task(client.call("create_custom_loss", loss(session_id)))
    await stack.trainer_backend.start()
    assert (await client.result(await creating))["loss_id"] == f"{session_id}:loss:0"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"session_id": "nobody"}, 404),
        ({"custom_loss_seq_id": -1}, 400),
        ({"inputs": [{"name": "logprobs", "rank": 3}]}, 400),
        ({"graph": "nodes"}, 400),
        ({"name": "x" * 201}, 400),
    ],
)
async def test_a_body_that_is_no_custom_loss_is_refused(client: Client, fields: dict[str, Any], status: int) -> None:
    await client.call("create_custom_loss", loss(await client.session()) | fields, status=status)


async def test_a_graph_holds_only_what_json_can(client: Client) -> None:
    session_id = await client.session()
    body = b'{"session_id": "%s", "custom_loss_seq_id": 0, "name": "x", "inputs": [], "graph": {"nodes": [NaN]}}'
    reply = await client.post("/api/v1/create_custom_loss", content=body % session_id.encode())
    assert reply.status_code == 400
    assert "graph" in reply.json()["detail"]


async def test_a_batch_must_name_a_custom_loss_of_its_session_and_nothing_else(client: Client) -> None:
    session_id = await client.session()
    loss_id = (await client.call("create_custom_loss", loss(session_id)))["request_id"]
    foreign = (await client.call("create_custom_loss", loss(await client.session())))["request_id"]
    model_id = await client.model(session_id)
    number = named(model_id, 3)
    number.loss_fn_config_v2["loss_id"].number = 1
    v1 = named(model_id, 4, loss_id=loss_id)
    v1.loss_fn_config["beta"] = 1
    own = batch(model_id, 6)
    own.custom_loss.name = "smuggled"
    for seq_id, (message, part) in enumerate(
        [
            (named(model_id, 1, loss_id=foreign), repr(foreign)),
            (named(model_id, 2), "takes loss_id"),
            (number, "takes loss_id"),
            (v1, "beta"),
            (named(model_id, 5, loss_id=loss_id, more="x"), "more"),
            (own, "custom_loss"),
        ],
        start=1,
    ):
        assert message.seq_id == seq_id
        failure = await train(client, message)
        assert failure["category"] == "user"
        assert part in failure["error"]
    assert isinstance(await train(client, named(model_id, 7, loss_id=loss_id)), bytes)
