"""Pages of other sites cannot reach a gateway without keys, and its own pages carry headers for browsers."""

from __future__ import annotations

import pytest
from starlette.responses import HTMLResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from gateway.http.middleware import SecurityHeaders
from tests.unit.gateway.stack import Client, Stack

CREATE = {"type": "create_session"}


async def test_a_name_that_points_here_is_no_name_of_this_gateway(client: Client) -> None:
    """DNS rebinding: the page's own name has become 127.0.0.1, so its requests are of its own origin."""
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "[::1].evil",
        "10.0.0.1",
        "localhost.x",
    ):
        reply = await client.post("/api/v1/create_session", json=CREATE, headers={"host": host})
        assert reply.status_code == 421, host
        assert "GATEWAY_ALLOWED_HOSTS" in reply.json()["detail"]
    for path in ("/metrics", "/openapi.json", "/api/v1/healthz", "/download/x", "/v1/models"):
        assert (await client.get(path, headers={"host": "evil.example"})).status_code == 421, path


@pytest.mark.parametrize("host", [None, "0.0.0.0:8000"])
async def test_a_post_of_another_sites_page_does_nothing(client: Client, host: str | None) -> None:
    """A form or fetch without preflight: text/plain, no header of ours. A gateway without keys would believe it."""
    for origin in (
        "https://evil.example",
        "null",
        "http://127.0.0.1:1",
        "http://localhost:3000",
        "file://",
        "http://[",
    ):
        headers = {"origin": origin, "content-type": "text/plain"}
        headers |= {} if host is None else {"host": host}
        reply = await client.post("/api/v1/create_session", content=b'{"type": "create_session"}', headers=headers)
        assert (reply.status_code, "another site" in reply.json()["detail"]) == (403, True), origin
    assert (await client.get("/api/v1/sessions")).json()["sessions"] == []


async def test_this_machines_own_names_are_answered(stack: Stack, client: Client) -> None:
    for host in (
        "localhost",
        "LOCALHOST:9",
        "127.0.0.1",
        "127.0.0.2:8000",
        "[::1]:8000",
        "0.0.0.0:8000",
        "[::]:8000",
        "",
    ):
        reply = await client.get("/api/v1/healthz", headers={"host": host})
        assert reply.status_code == 200, host
    own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    assert (await client.post("/api/v1/create_session", json=CREATE, headers=own)).status_code == 200


@pytest.mark.gateway(allowed_hosts=["tinsmith.lan"], public_url="https://tinker.example.org")
async def test_names_in_the_configuration_are_answered(client: Client) -> None:
    for host in ("tinsmith.lan:8000", "tinker.example.org"):
        headers = {"host": host, "origin": f"http://{host}"}
        assert (await client.post("/api/v1/create_session", json=CREATE, headers=headers)).status_code == 200
    behind_a_proxy = {"host": "127.0.0.1:8000", "origin": "https://tinker.example.org"}
    assert (await client.post("/api/v1/create_session", json=CREATE, headers=behind_a_proxy)).status_code == 200
    assert (await client.get("/api/v1/healthz", headers={"host": "evil.example"})).status_code == 421


@pytest.mark.gateway(api_keys=["tml-test"])
async def test_with_keys_any_name_will_do_for_those_who_have_one(client: Client) -> None:
    """A page does not know the key."""
    named = {"host": "tinker.example.org", "origin": "https://elsewhere.example"}
    assert (await client.post("/api/v1/create_session", json=CREATE, headers=named)).status_code == 200
    reply = await client.post("/api/v1/create_session", json=CREATE, headers={**named, "x-api-key": "tml-wrong"})
    assert reply.status_code == 401


@pytest.mark.gateway(api_keys=["tml-test"])
async def test_there_is_no_cors(client: Client) -> None:
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for reply in (
        await client.options("/api/v1/create_session", headers=preflight),
        await client.get("/api/v1/sessions", headers={"origin": "https://evil.example"}),
    ):
        assert not [name for name in reply.headers if name.startswith("access-control-")]


async def test_no_answer_is_taken_for_another_type(client: Client) -> None:
    for path in ("/api/v1/healthz", "/openapi.json", "/metrics", "/nowhere"):
        assert (await client.get(path)).headers["x-content-type-options"] == "nosniff"


def test_a_page_may_load_nothing_from_elsewhere_and_be_shown_in_no_frame() -> None:
    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        await HTMLResponse("<!doctype html>")(scope, receive, send)

    reply = TestClient(SecurityHeaders(page)).get("/")
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert reply.headers["referrer-policy"] == "no-referrer"
