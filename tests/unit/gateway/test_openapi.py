"""The OpenAPI document says what there is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from gateway.http.app import ROUTES
from gateway.http.openapi import document, routes_of
from tests.unit.gateway.stack import Stack
from tests.unit.gateway.test_isolation import walk

UNDESCRIBED = ("/api/v1/training_runs/{run_id}/checkpoints/{name}", "/v1/{path:path}")
"""Beginnings of paths that only refuse: checkpoints without a kind, and paths that do not exist."""


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return document(ROUTES)


def operations(made: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_every_route_of_the_apis_is_described() -> None:
    """A route that is no `Endpoint` would be missing in the document."""
    described = {(method, path) for method, path, _ in routes_of(ROUTES)}
    for each in walk(ROUTES):
        method, _, path = each.partition(" ")
        if path.startswith(("/api/v1", "/v1", "/download", "/metrics")) and not path.startswith(UNDESCRIBED):
            assert (method.lower(), path) in described, each


def test_every_operation_has_a_summary(made: dict[str, Any]) -> None:
    for method, path, operation in operations(made):
        assert re.fullmatch(r"[A-Z].{3,120}[^.]", operation["summary"]), (method, path)


def test_ids_of_operations_are_unique(made: dict[str, Any]) -> None:
    ids = [operation["operationId"] for *_, operation in operations(made)]
    assert len(ids) == len(set(ids)) > 50


def test_schemas_are_valid_and_references_lead_somewhere(made: dict[str, Any]) -> None:
    for schema in made["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for each in value.values():
                yield from references(each)
        elif isinstance(value, list):
            for each in value:
                yield from references(each)

    for reference in references(made):
        assert reference.removeprefix("#/components/schemas/") in made["components"]["schemas"]


def test_every_field_of_a_path_is_a_parameter(made: dict[str, Any]) -> None:
    for _, path, operation in operations(made):
        named = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
        assert named == set(re.findall(r"\{(.*?)\}", path))


def test_unsupported_fields_of_the_openai_api_show_in_the_schema(made: dict[str, Any]) -> None:
    chat = made["components"]["schemas"]["Chat"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["store"]["enum"] == [None, False]
    assert "Extension" in chat["properties"]["prompt_token_ids"]["description"]


@pytest.mark.gateway(api_keys=["tml-one"])
async def test_it_is_served_without_a_key_and_tells_who_needs_one(stack: Stack, made: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        reply = await client.get("/openapi.json")
        assert reply.json() == made
        asked = list(operations(made))
        # At once: for each request without a key the keys are read anew, at most every 0.25 s.
        replies = await asyncio.gather(
            *(client.request(method, re.sub(r"\{.*?\}", "x", path)) for method, path, _ in asked)
        )
    for reply, (_, path, operation) in zip(replies, asked, strict=True):
        assert (reply.status_code == 401) == ("security" not in operation), path
