"""JWT mode under attack: by one who has a key of this server, and wants to be another owner."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import jwt
import pytest
from jwt.algorithms import HMACAlgorithm
from pydantic import SecretStr

from gateway.config import GatewayConfig
from gateway.tenants.auth import id_of
from gateway.tenants.keys import hash_of
from gateway.tenants.tokens import Tokens
from tests.unit.gateway.stack import Client, Stack

ME = "/api/v1/auth/apikey/me"
SECRET = "of the server, and of nobody else: " + "s" * 40
KEYS = {"ann": "tml-ann-" + "a" * 32, "ben": "tml-ben-" + "b" * 32}
Claims = dict[str, Any]


def key_id(owner: str) -> str:
    return id_of(hash_of(KEYS[owner]))


@pytest.fixture
async def mint(stack: Stack) -> Tokens:
    """The server's own."""
    keys = [{"key": key, "owner": owner, "name": owner} for owner, key in KEYS.items()]
    await stack.restart_gateway(jwt_auth=True, jwt_secret=SecretStr(SECRET), api_keys=keys)
    assert stack.server is not None
    return stack.server.app.state.gateway.tenants.tokens


@pytest.fixture
async def http(stack: Stack, mint: Tokens) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url) as http:
        yield http


def part(value: Claims) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def parts(token: str) -> list[str]:
    return token.split(".")


def unsigned(algorithm: str) -> Callable[[str, Claims], str]:
    return lambda _, claims: f"{part({'alg': algorithm, 'typ': 'JWT'})}.{part(claims)}."


def signed(secret: str, algorithm: str = "HS256", **headers: Any) -> Callable[[str, Claims], str]:
    return lambda _, claims: jwt.encode(claims, secret, algorithm=algorithm, headers=headers)


ATTACKS: dict[str, Callable[[str, Claims], str]] = {
    "alg none": unsigned("none"),
    "alg None": unsigned("None"),
    "no alg": lambda _, claims: f"{part({'typ': 'JWT'})}.{part(claims)}.",
    "none, with the signature of one's own": lambda own, claims: unsigned("none")(own, claims) + parts(own)[2],
    "one's own signature": lambda own, claims: f"{parts(own)[0]}.{part(claims)}.{parts(own)[2]}",
    "no signature": lambda own, claims: f"{parts(own)[0]}.{part(claims)}.",
    "an empty secret": lambda own, claims: _hs256(claims, b""),
    "one's own key as the secret": signed(KEYS["ben"]),
    "the victim's key id as the secret": signed(key_id("ann") * 4),
    "another server's secret": signed("another server's secret, which is as long as it has to be"),
    "another algorithm": signed(SECRET, "HS512"),
    "a secret that the token itself brings": signed(
        "x" * 32, jwk={"kty": "oct", "k": base64.urlsafe_b64encode(b"x" * 32).decode()}, kid="../../dev/null"
    ),
    "expired": lambda _, claims: signed(SECRET)("", claims | {"exp": int(time.time()) - 1}),
    "not valid yet": lambda _, claims: signed(SECRET)("", claims | {"nbf": int(time.time()) + 600}),
    "without an end": lambda _, claims: signed(SECRET)("", {k: v for k, v in claims.items() if k != "exp"}),
    "without a key": lambda _, claims: signed(SECRET)("", {k: v for k, v in claims.items() if k != "key_id"}),
    "a key of no server": lambda _, claims: signed(SECRET)("", claims | {"key_id": "0" * 12}),
    "no key at all": lambda _, claims: signed(SECRET)("", claims | {"key_id": ""}),
}
"""From one's own valid token and the claims of the victim's. Those signed with SECRET are refused even so."""


def _hs256(claims: Claims, secret: bytes) -> str:
    algorithm = HMACAlgorithm(HMACAlgorithm.SHA256)
    body = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part(claims)}"
    signature = algorithm.sign(body.encode(), secret)
    return f"{body}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def test_the_tokens_made_here_would_pass_with_the_right_secret() -> None:
    claims = {"exp": int(time.time()) + 9}
    assert jwt.decode(_hs256(claims, SECRET.encode()), SECRET, algorithms=["HS256"]) == claims


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_a_forged_token_is_nobodys(mint: Tokens, http: httpx.AsyncClient, header: str) -> None:
    own = mint.issue("ben", key_id=key_id("ben"), email="")
    claims = jwt.decode(mint.issue("ann", key_id=key_id("ann"), email=""), options={"verify_signature": False})
    for attack, forge in ATTACKS.items():
        forged = forge(own, claims)
        reply = await http.get(ME, headers={header: forged if header == "x-api-key" else f"Bearer {forged}"})
        assert reply.status_code == 401, attack
        assert reply.headers["www-authenticate"] == 'Bearer error="invalid_token"', attack
        assert "JWT" in reply.json()["detail"], attack
        assert SECRET not in reply.text, attack
    assert (await http.get(ME, headers={"x-api-key": own})).json()["name"] == "ben"


async def test_the_key_that_a_token_was_issued_for_says_who_it_is_and_no_other_claim(
    mint: Tokens, http: httpx.AsyncClient
) -> None:
    token = mint.issue("ann", key_id=key_id("ben"), email="ann@example.org")
    assert (await http.get(ME, headers={"x-api-key": token})).json()["name"] == "ben"


async def test_a_token_reaches_what_its_owners_key_reaches_and_nothing_else(stack: Stack, mint: Tokens) -> None:
    tokens = {owner: mint.issue(owner, key_id=key_id(owner), email="") for owner in KEYS}
    ann = Client(base_url=stack.url, timeout=20, headers={"x-api-key": tokens["ann"]})
    ben = Client(base_url=stack.url, timeout=20, headers={"x-api-key": tokens["ben"]})
    async with ann, ben:
        model_id = await ann.model(await ann.session())
        await ann.call("get_info", {"model_id": model_id})
        await ben.call("get_info", {"model_id": model_id}, status=404)
        both = {"x-api-key": tokens["ben"], "authorization": f"Bearer {tokens['ann']}"}  # one of the two counts
        reply = await ben.post("/api/v1/get_info", json={"model_id": model_id}, headers=both)
        assert reply.status_code == 404
        assert (await ben.post("/api/v1/auth/token", json={})).json()["jwt"] == tokens["ben"]


async def test_a_token_is_no_key_where_tokens_are_off(stack: Stack, mint: Tokens, http: httpx.AsyncClient) -> None:
    token = mint.issue("ann", key_id=key_id("ann"), email="")
    await stack.restart_gateway(jwt_auth=False)
    assert (await http.get(ME, headers={"x-api-key": token})).status_code == 401


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32 characters"):
        GatewayConfig(jwt_secret=SecretStr("s" * 31))
