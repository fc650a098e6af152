"""Requests that schemathesis makes from the OpenAPI document: no 500, no hang, and answers as the document has them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from gateway.http.app import ROUTES
from gateway.http.openapi import document
from tests.fuzz.servers import FakeServer, make_some
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tests.unit.gateway.stack import Client

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    unsupported_method,
]
TIMEOUT_S = 20.0
KEY = {"X-API-Key": "tml-test"}

SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}

schema = schemathesis.openapi.from_dict(document(ROUTES))


@schemathesis.serializer("application/x-protobuf", "application/x-tar")
def as_bytes(context: Any, value: Any) -> Any:
    return value if isinstance(value, bytes) else str(value).encode()


def with_known(value: Any, known: dict[str, str], draw: random.Random) -> Any:
    """With ids that exist in most of the places where ids stand: others are refused before anything else is read."""
    if not isinstance(value, dict):
        return value
    return {
        key: known[key] if key in known and draw.random() < 0.8 else with_known(each, known, draw)
        for key, each in value.items()
    }


ENDS_THEM = ("sessions.finish_session", "checkpoints.delete")
"""Operations after which a known id would be known no more."""


def attack(case: Any, url: str, known: dict[str, str], seed: int) -> None:
    draw = random.Random(seed)
    if case.operation.definition.raw["operationId"] in ENDS_THEM:
        known = {}
    case.body = with_known(case.body, known, draw)
    case.path_parameters = with_known(case.path_parameters, known, draw)
    if case.path.startswith("/v1/chat") and isinstance(case.body, dict):
        limits = ("max_tokens", "max_completion_tokens")
        if all(case.body.get(name) is None for name in limits):  # a random model hardly ends by itself
            case.body["max_tokens"] = 8
    if case.path == "/v1/responses" and isinstance(case.body, dict) and case.body.get("max_output_tokens") is None:
        case.body["max_output_tokens"] = 8
    try:
        case.call_and_validate(base_url=url, headers=KEY, checks=CHECKS, timeout=TIMEOUT_S, allow_redirects=False)
    except requests.Timeout:
        pytest.fail(f"no answer after {TIMEOUT_S:g} s: {case.as_curl_command()}")


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with FakeServer(tmp_path_factory.mktemp("fakes")) as server:
        yield server


@schema.given(seed=st.integers(0, 2**32))
@schema.parametrize()
@settings(max_examples=4, **SETTINGS)
def test_no_request_makes_the_gateway_fail(case: Any, fakes: FakeServer, seed: int) -> None:
    attack(case, fakes.url, fakes.known, seed)


@pytest.fixture(scope="module")
def real(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of the real stack, and things that it has."""
    env = {"GATEWAY_LONG_POLL_S": "0.2", "GATEWAY_OPENAI_WAIT_S": "2"}
    with Stack(tmp_path_factory.mktemp("stack"), base_models=[f"{BASE_MODEL}={toy}"], env=env) as stack:
        yield stack.base_url, asyncio.run(_known(stack.base_url))
        with httpx.Client(base_url=stack.base_url, headers=KEY) as client:  # all of it lives, and still works
            prompt = {"model": BASE_MODEL, "prompt": "One", "max_tokens": 2}
            assert client.post("/v1/completions", json=prompt).status_code == 200
            assert len(stack.processes()) >= 3


async def _known(url: str) -> dict[str, str]:
    async with Client(base_url=url, headers=KEY, timeout=60) as client:
        return await make_some(client, base_model=BASE_MODEL)


@pytest.mark.slow
@schema.given(seed=st.integers(0, 2**32))
@schema.parametrize()
@settings(max_examples=60, **SETTINGS)
def test_no_request_makes_the_real_services_fail(case: Any, real: tuple[str, dict[str, str]], seed: int) -> None:
    attack(case, *real, seed)
