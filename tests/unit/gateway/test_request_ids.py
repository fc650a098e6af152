"""Ids that lead from an answer to the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from gateway.config import GatewayConfig
from gateway.http.app import create_app
from tests.unit.gateway.stack import Client


async def test_each_answer_has_an_id_of_its_own_or_the_one_that_came(client: Client) -> None:
    first, second = [(await client.get("/api/v1/healthz")).headers["x-request-id"] for _ in range(2)]
    assert first != second
    named = await client.get("/api/v1/healthz", headers={"x-request-id": "job-7:try.2"})
    assert named.headers["x-request-id"] == "job-7:try.2"


@pytest.mark.parametrize("given", ["a b", "x" * 129, 'x"}', "ü", ""])
async def test_an_id_that_has_no_business_in_a_log_is_replaced(client: Client, given: str) -> None:
    reply = await client.get("/api/v1/healthz", headers={"x-request-id": given.encode()})
    assert reply.headers["x-request-id"] not in ("", given)


async def test_the_answer_to_a_failure_of_our_own_has_it_too(tmp_path: Path) -> None:
    app = create_app(GatewayConfig(state_dir=tmp_path))

    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    app.state.gateway.clients.settle = broken
    reply = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False).get(
        "/api/v1/get_server_capabilities", headers={"x-request-id": "mine"}
    )
    assert (reply.status_code, reply.headers["x-request-id"]) == (500, "mine")
