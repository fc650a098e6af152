"""Keys that may call, and the answer to those that may not."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import jwt
import pytest
from pydantic import SecretStr, ValidationError

from gateway.clients import Clients
from gateway.config import GatewayConfig
from gateway.database.store import Store
from gateway.metrics import Metrics
from gateway.tenants.auth import LOCAL, Callers, owner_of
from gateway.tenants.tokens import InvalidToken, Tokens
from tests.support.waiting import until
from tests.unit.gateway.stack import BASE_MODEL, FakeTrainer, Stack
from tinsmith.rpc.auth import ApiKey
from tinsmith.rpc.server import Server
from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc

RIGHT = "tml-right"
NAMED = {"key": "tml-named", "name": "laptop", "note": "for tests", "email": "ada@example.org"}
SECRET = "a secret of at least 64 characters, which is what HS512 asks for"


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """No header but those that a test gives."""
    async with httpx.AsyncClient(base_url=stack.url) as http:
        yield http


with_keys = partial(pytest.mark.gateway, api_keys=[RIGHT, NAMED])
"""Decorator of tests; takes further settings."""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": RIGHT}, 200),
        ({"authorization": f"Bearer {RIGHT}"}, 200),
        ({"authorization": "bearer tml-named"}, 200),
        ({"x-api-key": RIGHT, "authorization": "Bearer tml-wrong"}, 200),
        ({"x-api-key": "tml-wrong", "authorization": f"Bearer {RIGHT}"}, 401),
        ({"authorization": f"Basic {RIGHT}"}, 401),
        ({"authorization": RIGHT}, 401),
        ({"x-api-key": "tml-right, tml-wrong"}, 401),
        ({"x-api-key": "tml-\xe4"}, 401),
        ({}, 401),
    ],
    ids=str,
)
@with_keys()
async def test_a_key_comes_in_either_header(http: httpx.AsyncClient, headers: dict[str, str], status: int) -> None:
    encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    for path in ("/api/v1/get_server_capabilities", "/api/v1/auth/apikey/me"):
        reply = await http.get(path, headers=encoded)
        assert reply.status_code == status
        if status == 401:
            what = "holds no key of this server" if headers and "Basic" not in str(headers) else "is missing"
            assert what in reply.json()["detail"] or headers == {"authorization": RIGHT}
            assert reply.headers["www-authenticate"] == "Bearer"  # and no invalid_token: the SDK gives up at once


@with_keys()
async def test_a_refusal_below_v1_has_openais_form(http: httpx.AsyncClient) -> None:
    reply = await http.get("/v1/models", headers={"authorization": "Bearer tml-wrong"})
    assert reply.status_code == 401
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "holds no key of this server" in error["message"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/api/v1/client/config", "this server has no POST /v1/api/v1/client/config; leave /v1 out of the base URL"),
        ("/x/api/v1/asample", "this server has no POST /x/api/v1/asample; leave /x out of the base URL"),
        ("/chat/completions", "this server has no POST /chat/completions; add /v1 to the base URL"),
        ("/v1/none", "this server has no POST /v1/none"),
        ("/api/v1/none", "this server has no POST /api/v1/none"),
    ],
)
async def test_a_wrong_base_url_is_named(http: httpx.AsyncClient, path: str, message: str) -> None:
    reply = await http.post(path, headers={"authorization": "Bearer tml-any"})
    assert reply.status_code == 404
    said = reply.json()
    assert (said["error"]["message"] if "error" in said else said["detail"]) == message


@pytest.mark.parametrize("path", ["/api/v1/healthz", "/metrics", "/download/none", "/openapi.json"])
@with_keys()
async def test_these_need_no_key(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code not in (401, 500)


@pytest.mark.parametrize(
    "path", ["/api/v1/training_runs/healthz", "/api/v1/x/healthz", "/api/v1/healthz/", "/v1/healthz"]
)
@with_keys()
async def test_a_path_that_only_looks_like_healthz_needs_one(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path)).status_code == 401


async def test_without_keys_anyone_is_the_local_caller(stack: Stack, http: httpx.AsyncClient) -> None:
    for headers in ({}, {"x-api-key": "tml-any"}, {"x-api-key": "eyJ.not.jwt"}):
        reply = await http.get("/api/v1/auth/apikey/me", headers=headers)
        assert (reply.status_code, reply.json()["key_id"]) == (200, 0)


def test_a_key_keeps_its_id_wherever_it_stands_and_does_not_show(stack: Stack) -> None:
    one, other = (ApiKey(key=SecretStr(key)) for key in ("tml-one", "tml-other"))
    tenants = stack.gateway.tenants
    first, second = (
        Callers(keys, tenants.keys, also_read=tenants.limits.refresh) for keys in ([one, other], [other, one])
    )
    found, moved = first.by_key("tml-one"), second.by_key("tml-one")
    assert found is not None
    assert moved is not None
    assert found.key_id == moved.key_id
    assert found.number == moved.number < 2**53  # JSON numbers are doubles in many a client
    assert (found.name, moved.name) == ("api_keys[0]", "api_keys[1]")
    assert "tml-one" not in repr(found)
    assert first.by_key("tml-none") is first.by_key("") is None
    assert first.by_owner(owner_of("tml-other")) == first.by_key("tml-other")
    assert first.by_owner(LOCAL) is None


async def test_a_service_key_that_a_trainer_does_not_know_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    server = Server("127.0.0.1:0", [trainer_pb2.DESCRIPTOR], api_keys=["tml-service"])
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(FakeTrainer(), server.grpc)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    right, wrong = (
        Clients(GatewayConfig(trainers=[address], samplers=[], service_key=SecretStr(key)), Metrics())
        for key in ("tml-service", "tml-other")
    )
    with caplog.at_level("INFO"):
        for clients in (right, wrong):
            await clients.start()
        assert (await right.settle(lambda: right.serving(BASE_MODEL)))[0].address == address
        await until(lambda: f"{address} does not say yet what it serves: the metadata x-api-key" in caplog.text)
    assert wrong.unreached == [address]
    for clients in (right, wrong):
        await clients.close()
    await server.stop(0)


# JWTs


def tokens(**settings: Any) -> Tokens:
    return Tokens(GatewayConfig(jwt_auth=True, jwt_secret=SecretStr(SECRET), **settings))


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    given = {
        "iat": now,
        "exp": now + 86400,
        "sub": "tml:organization_user:x",
        "org_id": "o",
        "email": "",
        "key_id": "k",
    } | changes
    return {name: value for name, value in given.items() if value is not None}


def test_a_token_names_its_owner_until_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    token = tokens(jwt_lifetime_s=100, organization="lab").issue("abc", key_id="k1", email="a@b")
    read = jwt.decode(token, options={"verify_signature": False})
    assert read["exp"] - read["iat"] == 100
    assert (read["sub"], read["org_id"], read["email"]) == ("tml:organization_user:abc", "lab", "a@b")
    assert tokens().key_id_of(token) == "k1"
    then = time.time() - 200
    monkeypatch.setattr(time, "time", lambda: then)
    old = tokens(jwt_lifetime_s=100).issue("abc", key_id="k1", email="")
    monkeypatch.undo()
    with pytest.raises(InvalidToken, match="has expired"):
        tokens().key_id_of(old)


@pytest.mark.parametrize(
    "token",
    [
        jwt.encode(claims(), "b" * 32, algorithm="HS256"),
        jwt.encode(claims(), SECRET, algorithm="HS512"),
        jwt.encode(claims(), None, algorithm="none"),
        jwt.encode(claims(exp=None), SECRET, algorithm="HS256"),
        jwt.encode(claims(sub=None), SECRET, algorithm="HS256"),
        jwt.encode(claims(sub=7), SECRET, algorithm="HS256"),
        jwt.encode(claims(), SECRET, algorithm="HS256")[:-2],
        "eyJ",
        "eyJ.eyJ.x",
    ],
    ids=["other secret", "other algorithm", "unsigned", "no end", "no subject", "number", "cut", "no JWT", "garbage"],
)
def test_a_token_that_was_not_issued_here_is_refused(token: str) -> None:
    assert tokens().key_id_of(jwt.encode(claims(), SECRET, algorithm="HS256")) == "k"
    with pytest.raises(InvalidToken, match="was not issued by this server"):
        tokens().key_id_of(token)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValidationError, match="at least 32 characters"):
        GatewayConfig(jwt_secret=SecretStr("short"))
    with pytest.raises(ValidationError, match="organization"):
        GatewayConfig(organization="two words")


async def test_gateways_of_one_database_share_a_secret_that_none_was_given(stack: Stack) -> None:
    first, second = (Tokens(GatewayConfig(jwt_auth=True)) for _ in range(2))
    assert stack.server is not None
    store: Store = stack.server.app.state.gateway.store
    await first.start(store)
    await second.start(store)
    assert second.key_id_of(first.issue("abc", key_id="k1", email="")) == "k1"


async def test_others_on_this_machine_cannot_read_the_database(stack: Stack) -> None:
    await stack.stop_gateway()
    (stack.state_dir / "gateway.db").chmod(0o644)  # as earlier versions made it
    await stack.start_gateway()
    files = list(stack.state_dir.glob("gateway.db*"))
    assert files
    assert {stat.S_IMODE(os.stat(file).st_mode) for file in files} == {0o600}
