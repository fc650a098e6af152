"""Fields that the server does not know: refused by name, everywhere and in every form."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import tinker
from pydantic import BaseModel, ValidationError
from tinker.proto import tinker_public_pb2

from gateway import schema_types, schemas
from gateway.codec import parse
from gateway.http.app import ROUTES
from gateway.http.openapi_bodies import LoadWeights
from gateway.openai import response_schemas
from gateway.openai import schemas as openai_schemas
from tests.unit.gateway.stack import BASE_MODEL, Client, batch, sample_body
from tests.unit.gateway.test_isolation import walk
from tinsmith.errors import InvalidRequest
from tinsmith.v1 import trainer_pb2

SCHEMAS = sorted(
    {
        schema
        for module in (schemas, schema_types, openai_schemas, response_schemas)
        for _, schema in inspect.getmembers(module, inspect.isclass)
        if issubclass(schema, BaseModel) and schema.__module__ == module.__name__
    },
    key=lambda schema: (schema.__module__, schema.__name__),
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_schema_refuses_what_it_does_not_know_but_not_null(schema: type[BaseModel]) -> None:
    def refused(content: dict[str, Any]) -> list[tuple[int | str, ...]]:
        try:
            schema.model_validate(content)
        except ValidationError as error:
            return [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
        return []

    many = {f"colour_{n}": n for n in range(100)}
    assert refused(many) == [("colour_0",)], "one error, however many there are"
    assert refused({"colour": False}) == [("colour",)]
    assert refused({"colour": None}) == []


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_null_counts_as_absent_in_every_field_that_may_be_absent(schema: type[BaseModel]) -> None:
    for name, field in schema.model_fields.items():
        if field.annotation is float:
            continue  # see below
        content = {field.alias or name: None}
        try:
            schema.model_validate(content)
        except ValidationError as error:
            wrong = {each["loc"][0]: each["type"] for each in error.errors() if each["loc"]}
            assert field.is_required() or (field.alias or name) not in wrong, wrong


@pytest.mark.parametrize("name", schemas.AdamParams.model_fields)
def test_null_is_refused_where_it_may_have_been_nan(name: str) -> None:
    with pytest.raises(ValidationError, match="valid number"):
        schemas.AdamParams.model_validate({name: None})


def test_null_is_a_value_of_a_field_that_must_be_sent() -> None:
    assert schemas.SetTtl.model_validate({"ttl_seconds": None}).ttl_seconds is None
    with pytest.raises(ValidationError, match="Field required"):
        schemas.SetTtl.model_validate({})


async def test_a_body_is_refused_with_the_fields_name_and_value(client: Client) -> None:
    session = {"tags": [], "sdk_version": "9", "type": "create_session", "shade": None}
    await client.call("create_session", session)
    error = (await client.call("create_session", session | {"colour": "red"}, status=400))["detail"]
    assert error == "colour: this server knows no such field and cannot apply 'red'; leave it out"


async def test_a_wrong_value_is_named_by_its_place_in_the_body() -> None:
    sample = sample_body("s", 1) | {"sampling_params": {"stop": {"a": 1}}}
    with pytest.raises(InvalidRequest, match=r"^sampling_params\.stop: ") as refused:
        parse(schemas.Sample, sample)
    assert refused.value.metadata["field"] == "sampling_params.stop"


async def test_a_parameter_of_a_url_is_refused(client: Client) -> None:
    reply = await client.get("/api/v1/training_runs?limit=3&ofset=7")
    assert reply.status_code == 400
    assert "ofset" in reply.json()["detail"]
    assert "'7'" in reply.json()["detail"]


async def test_every_route_refuses_a_parameter_that_it_does_not_know(client: Client) -> None:
    """`prune?dry_run=true` deleted: the body says whether it is only looked."""
    needed = "base_model=b&name=n&starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z"
    asked, open_to_all = 0, ("/metrics", "/openapi.json", "/api/v1/healthz", "/dashboard", "/download")
    for each in walk(ROUTES):
        method, _, path = each.partition(" ")
        is_refused_anyway = "/checkpoints/{name}" in path
        if path == "/" or path.startswith(open_to_all) or is_refused_anyway:
            continue
        url = re.sub(r"\{\w+(?::path)?\}", "x", path)
        reply = await client.request(method, f"{url}?colour=red&{needed}", json={})
        assert reply.status_code == 400, (each, reply.text)
        assert "colour: this server knows no such field and cannot apply 'red'" in reply.text, each
        asked += 1
    assert asked > 50


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("colour", {"colour": 1}),
        ("sampling_params.colour", {"sampling_params": {"max_tokens": 2, "colour": 1}}),
        ("prompt.colour", {"prompt": {"chunks": [], "colour": 1}}),
        ("prompt.chunks[0].colour", {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1], "colour": 1}]}}),
        (
            "target_prompt_logprobs.colour",
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "colour": 1}},
        ),
    ],
)
async def test_a_sample_is_refused(client: Client, name: str, fields: dict[str, Any]) -> None:
    sampler = await client.sampling_session(await client.session())
    answer = await client.result(await client.call("asample", sample_body(sampler, 1, **fields)))
    assert answer["category"] == "user"
    assert answer["error"].startswith(f"{name}: this server knows no such field and cannot apply 1")


async def test_a_step_is_refused_and_uses_up_its_number(client: Client) -> None:
    model_id = await client.model(await client.session())
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1, "lr": 0.2}}
    assert "adam_params.lr" in (await client.result(await client.call("optim_step", step)))["error"]
    step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1, "lr": None}}
    assert "error" not in await client.result(await client.call("optim_step", step))


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("completions", "colour", {"prompt": "a", "colour": "red"}),
        ("chat/completions", "messages[0].colour", {"messages": [{"role": "user", "content": "a", "colour": "red"}]}),
        ("responses", "text.colour", {"input": "a", "text": {"colour": "red"}}),
    ],
)
async def test_a_field_of_the_openai_api_is_refused_with_its_name_and_value(
    client: Client, path: str, name: str, body: dict[str, Any]
) -> None:
    reply = await client.post(f"/v1/{path}", json={"model": BASE_MODEL, **body})
    assert reply.status_code == 400
    expected = f"{name}: is not supported by this server, which cannot apply 'red'; leave it out"
    assert reply.json()["error"]["message"] == expected


TOKENS = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
TENSOR = {"data": [1, 2], "dtype": "int64"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("colour", lambda body: body.update(colour=1)),
        ("forward_backward_input.colour", lambda body: body["forward_backward_input"].update(colour=1)),
        ("data[0].colour", lambda body: _datum(body).update(colour=1)),
        ("data[0].model_input.colour", lambda body: _datum(body)["model_input"].update(colour=1)),
        (
            "data[0].model_input.chunks[0].colour",
            lambda body: _chunk(body).update(colour=1),
        ),
        ("data[0].loss_fn_inputs.target_tokens.colour", lambda body: _tensor(body).update(colour=1)),
    ],
)
async def test_a_batch_in_json_is_refused(client: Client, name: str, change: Any) -> None:
    model_id = await client.model(await client.session())
    datum = {"model_input": {"chunks": [dict(TOKENS["chunks"][0])]}, "loss_fn_inputs": {"target_tokens": dict(TENSOR)}}
    content = {
        "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
        "model_id": model_id,
        "seq_id": 1,
    }
    change(content)
    answer = await client.result(await client.call("forward_backward", content))
    assert answer["category"] == "user"
    assert answer["error"].startswith(f"{name}: this server knows no such field and cannot apply 1")


def _datum(body: Any) -> Any:
    return body["forward_backward_input"]["data"][0]


def _chunk(body: Any) -> Any:
    return _datum(body)["model_input"]["chunks"][0]


def _tensor(body: Any) -> Any:
    return _datum(body)["loss_fn_inputs"]["target_tokens"]


FIELD_1000 = b"\xc0\x3e\x01"
"""A number, 1, in protobuf."""


@pytest.mark.parametrize("inside", [False, True])
async def test_a_batch_in_protobuf_is_refused(client: Client, inside: bool) -> None:
    model_id = await client.model(await client.session())
    message = batch(model_id, 1)
    body = message.SerializeToString()
    if inside:
        datum = message.data[0].SerializeToString() + FIELD_1000
        body += b"\x1a" + bytes([len(datum)]) + datum
    else:
        body += FIELD_1000
    headers = {"content-type": "application/x-protobuf"}
    reply = await client.post("/api/v1/forward_backward", content=body, headers=headers)
    answer = await client.result(reply.json())
    where = "data[1].field number 1000" if inside else "field number 1000"
    assert answer["error"].startswith(f"{where}: this server knows no such field")
    assert (await client.forward_backward(model_id, 2)).status_code == 200


def test_every_field_of_the_sdks_batches_is_known() -> None:
    def fields(message: Any, prefix: str = "") -> set[str]:
        found = set()
        for field in message.fields:
            found.add(f"{prefix}{field.number}")
            if field.message_type is not None:
                found |= fields(field.message_type, f"{prefix}{field.number}.")
        return found

    theirs = tinker_public_pb2.DESCRIPTOR.message_types_by_name["ForwardBackwardRequest"]
    assert fields(theirs) <= fields(trainer_pb2.ForwardBackwardRequest.DESCRIPTOR)


def test_every_field_of_the_sdks_requests_is_known() -> None:
    requests = {
        name.removesuffix("Request"): member
        for name, member in inspect.getmembers(tinker.types, inspect.isclass)
        if name.endswith("Request") and issubclass(member, BaseModel)
    }
    ours = {schema.__name__: schema for schema in SCHEMAS} | {"LoadWeights": LoadWeights}
    del requests["OptimStep"]  # the SDK writes its optim_params under the names of the optimizers
    compared = requests.keys() & ours.keys()
    assert {"CreateSession", "CreateModel", "Sample", "SaveWeights"} <= compared
    for name in sorted(compared):
        theirs = requests[name].model_fields.keys() - {"type"}
        assert theirs <= ours[name].model_fields.keys(), name


async def test_an_openai_request_is_refused(client: Client) -> None:
    body = {"model": BASE_MODEL, "prompt": "a", "shade": None, "colour": 1}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "colour"
