"""Ids with a NUL character, which JSON and URLs can write and PostgreSQL takes in no text: refused as others are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from starlette.routing import BaseRoute, Mount, Route

from gateway.http.app import ROUTES
from tests.unit.gateway.stack import BASE_MODEL, Client, batch

NUL = "a\0b"
RANK = {"lora_config": {"rank": 8}}
SAMPLE = {"num_samples": 1, "prompt": {"chunks": []}, "sampling_params": {}}
TARGET = {"type": "sampling_session", "sampling_session_id": NUL}
CURSOR = {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": NUL}
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("session_id", "session_heartbeat", {}),
    ("session_id", "create_model", {"model_seq_id": 0, "base_model": BASE_MODEL, **RANK}),
    ("session_id", "create_sampling_session", {"sampling_session_seq_id": 0, "base_model": BASE_MODEL}),
    ("session_id", "copy_weights", {"source_path": "tinker://a:train:0/weights/x", "model_seq_id": 5}),
    ("session_id", "create_custom_loss", {"custom_loss_seq_id": 0, "name": "x", "inputs": [], "graph": {}}),
    ("session_id", "sessions/search", {}),
    ("cursor.last_session_id", "sessions/search", {"cursor": CURSOR}),
    ("project_ids[0]", "sessions/search", {"project_ids": [NUL]}),
    ("display_name", "sessions/search", {}),
    ("model_id", "optim_step", {"seq_id": 1, "adam_params": {}}),
    ("model_id", "save_weights", {"seq_id": 1, "path": "x"}),
    ("model_id", "save_weights_for_sampler", {"seq_id": 1, "path": "x"}),
    ("model_id", "save_weights_external", {"seq_id": 1, "path": "x"}),
    ("model_id", "load_weights", {"seq_id": 1, "path": "tinker://a:train:0/weights/x"}),
    ("model_id", "get_info", {}),
    ("sampling_session_id", "asample", {"seq_id": 1, **SAMPLE}),
    ("sampling_session_id", "join_sampling_session", {}),
    ("target.sampling_session_id", "retrieve_futures", {"target": TARGET}),
    ("request_id", "retrieve_future", {}),
    ("request_id", "cancel_future", {}),
    ("tinker_path", "weights_info", {"tinker_path": "tinker://a\0b:train:0/weights/x"}),
]


pytestmark = pytest.mark.usefixtures("either_database")


async def test_an_id_in_a_body_is_refused_by_field(client: Client) -> None:
    for field, path, body in BODIES:
        given = body if "." in field else {field: NUL} | body
        assert (await client.call(path, given, status=400))["detail"].startswith(f"{field}: "), (path, field)
    content = batch(NUL, 1).SerializeToString()
    headers = {"content-type": "application/x-protobuf"}
    reply = await client.post("/api/v1/forward_backward", content=content, headers=headers)
    assert (reply.status_code, reply.json()["detail"][:9]) == (400, "model_id:")


def all_routes(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Mount):
            yield from all_routes(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            for method in (route.methods or set()) - {"HEAD"}:
                yield method, prefix + route.path


async def test_an_id_in_a_path_is_that_of_nothing(client: Client) -> None:
    asked = 0
    for method, path in all_routes(ROUTES):
        for parameter in re.findall(r"\{\w+(?::path)?\}", path):
            url = re.sub(r"\{\w+(?::path)?\}", "x", path.replace(parameter, "a%00b"))
            reply = await client.request(method, url, json={})
            assert reply.status_code == 404, (method, url, reply.text)
            asked += 1
    assert asked > 20


@pytest.mark.parametrize("path", ["training_runs", "billing/usage/checkpoints/current"])
async def test_an_id_in_a_query_is_refused_by_field(client: Client, path: str) -> None:
    reply = await client.get(f"/api/v1/{path}", params={"project_id": NUL})
    assert (reply.status_code, reply.json()["detail"][:11]) == (400, "project_id:")


async def test_a_refusal_that_names_a_key_can_be_asked_for(client: Client) -> None:
    body = {"session_id": await client.session(), "model_seq_id": 0, "base_model": BASE_MODEL}
    for seq, fields in enumerate(({"user_metadata": {NUL: "x"}, **RANK}, {"lora_config": {"rank": 8, NUL: 1}})):
        receipt = await client.call("create_model", body | fields | {"model_seq_id": seq})
        assert NUL in (await client.result(receipt))["error"]


async def test_a_name_with_nul_in_a_batch_is_not_found(client: Client) -> None:
    model_id = await client.model(await client.session())
    message = batch(model_id, 1)
    message.loss_fn = "custom"
    message.loss_fn_config.clear()
    message.loss_fn_config_v2["loss_id"].text = NUL
    headers = {"content-type": "application/x-protobuf"}
    reply = await client.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)
    assert "loss_fn_config.loss_id: there is no custom loss" in (await client.result(reply.json()))["error"]
    message = batch(model_id, 2)
    message.loss_fn = "stable_reinforce"
    message.data[0].model_input_spans.add().sampled_tokens.sequence_id = NUL
    reply = await client.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)
    assert "data[0]" in (await client.result(reply.json()))["error"]
