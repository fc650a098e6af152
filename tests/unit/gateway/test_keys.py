"""A caller's own key: over HTTP, with the SDK's whoami, and with `tinker auth`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.tenants.auth import owner_of
from gateway.tenants.tokens import Tokens
from tests.support.forking import FORKS, Done, command, run
from tests.unit.gateway import sdk_programs
from tests.unit.gateway.stack import Client, Stack
from tests.unit.gateway.test_auth import NAMED, RIGHT, SECRET, with_keys

ME = "/api/v1/auth/apikey/me"
TOKEN = "/api/v1/auth/token"


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, headers={"x-api-key": NAMED["key"]}) as http:
        yield http


@with_keys(organization="lab")
async def test_a_key_is_described_as_the_configuration_names_it(http: httpx.AsyncClient) -> None:
    named = (await http.get(ME)).json()
    assert named.pop("key_id") == int(owner_of(NAMED["key"])[:12], 16)
    details = {"org_details": {"name": "lab"}, "user_details": {"email": "ada@example.org"}}
    assert named == {"name": "laptop", "note": "for tests", "details": details}
    plain = (await http.get(ME, headers={"x-api-key": RIGHT})).json()
    assert (plain["name"], plain["note"], plain["details"]["user_details"]) == ("api_keys[0]", "", {"email": ""})


async def test_where_any_key_is_accepted_the_answer_says_so(http: httpx.AsyncClient) -> None:
    found = (await http.get(ME)).json()
    assert (found["key_id"], found["name"]) == (0, "any key")
    assert "accepts any key" in found["note"]


@with_keys()
async def test_a_key_cannot_be_deleted_and_stays_valid(http: httpx.AsyncClient) -> None:
    refused = await http.delete(ME)
    assert refused.status_code == 403
    assert "'laptop' stays valid" in refused.json()["detail"]
    assert (await http.get(ME)).status_code == 200


async def test_no_token_is_issued_unless_the_setting_is_on(stack: Stack, http: httpx.AsyncClient) -> None:
    reply = await http.post(TOKEN, json={})
    assert reply.status_code == 404
    assert "jwt_auth is off" in reply.json()["detail"]
    await stack.restart_gateway(api_keys=[RIGHT, NAMED], jwt_auth=True)
    config = await http.post("/api/v1/client/config", json={"sdk_version": "0.38.0"})
    assert config.json()["pjwt_auth_enabled"] is True


@with_keys(jwt_auth=True)
async def test_a_token_stands_for_its_key_beside_the_key_itself(http: httpx.AsyncClient) -> None:
    token = (await http.post(TOKEN, json={})).json()["jwt"]
    for headers in ({"x-api-key": token}, {"authorization": f"Bearer {token}"}, {}):
        assert (await http.get(ME, headers=headers)).json()["name"] == "laptop"
    # Key and token are one owner: a session created with the one is found with the other.
    created = await http.post("/api/v1/create_session", json={}, headers={"x-api-key": token, "x-idempotency-key": "i"})
    again = await http.post("/api/v1/create_session", json={}, headers={"x-idempotency-key": "i"})
    assert created.json() == again.json()


@with_keys(jwt_auth=True)
async def test_a_token_is_not_renewed_by_itself(http: httpx.AsyncClient) -> None:
    token = (await http.post(TOKEN, json={})).json()["jwt"]
    await asyncio.sleep(1.1)  # claims count whole seconds
    assert (await http.post(TOKEN, json={}, headers={"x-api-key": token})).json()["jwt"] == token
    assert (await http.post(TOKEN, json={})).json()["jwt"] != token


@pytest.mark.parametrize("has_keys", [True, False])
async def test_a_bad_token_is_answered_with_the_challenge_that_makes_the_sdk_ask_again(
    stack: Stack, http: httpx.AsyncClient, has_keys: bool
) -> None:
    settings: dict[str, Any] = {"jwt_auth": True, "jwt_secret": SecretStr(SECRET)}
    await stack.restart_gateway(**settings, api_keys=[RIGHT, NAMED] if has_keys else [])
    assert stack.server is not None
    mint: Tokens = stack.server.app.state.gateway.tenants.tokens
    removed, valid = (mint.issue("x", key_id=key_id, email="") for key_id in ("0" * 12, ""))
    for token in (removed, "eyJ.forged.x", valid + "x"):
        reply = await http.get(ME, headers={"x-api-key": token})
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == 'Bearer error="invalid_token"'
        assert "JWT" in reply.json()["detail"]
    valid = mint.issue("x", key_id=owner_of(RIGHT)[:12] if has_keys else "", email="")
    assert (await http.get(ME, headers={"x-api-key": valid})).status_code == 200


# The SDK and its command line, each in a process of its own


def environment(stack: Stack, home: Path, key: str = "") -> dict[str, str]:
    """With a home folder of its own, and `key` unless it is empty."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    env |= {"HOME": str(home), "TINKER_BASE_URL": stack.url, "TINKER_TELEMETRY": "0"}
    return env | ({"TINKER_API_KEY": key} if key else {})


async def tinker_command(*argv: str, stack: Stack, home: Path, key: str = "", given: str = "") -> Done:
    return await run(command, "tinker.cli", argv, env=environment(stack, home, key), given=given)


@with_keys(jwt_auth=True, organization="lab")
async def test_whoami_of_the_sdk_reads_the_keys_holder(stack: Stack, tmp_path: Path) -> None:
    done = await run(sdk_programs.whoami, NAMED["key"], RIGHT, env=environment(stack, tmp_path))
    assert done.status == 0, done.output
    assert done.output.splitlines() == [
        f"tml:organization_user:{owner_of(NAMED['key'])} tml:organization:lab ada@example.org",
        f"tml:organization_user:{owner_of(RIGHT)} tml:organization:lab None",
    ]


@with_keys(jwt_auth=True, jwt_secret=SecretStr(SECRET))
async def test_the_sdk_asks_for_another_token_when_its_own_is_refused(stack: Stack, tmp_path: Path) -> None:
    trained, may_go_on = FORKS.Event(), FORKS.Event()
    env = environment(stack, tmp_path, NAMED["key"])
    training = asyncio.create_task(run(sdk_programs.train_before_and_after, trained, may_go_on, env=env))
    assert await asyncio.to_thread(trained.wait, 60)
    await stack.restart_gateway(jwt_secret=SecretStr(SECRET[::-1]))  # all tokens that it had issued are invalid
    may_go_on.set()
    done = await training
    assert done.status == 0, done.output


@with_keys(jwt_auth=True)
async def test_tinker_auth_whoami(stack: Stack, tmp_path: Path) -> None:
    done = await tinker_command("--format", "json", "auth", "whoami", stack=stack, home=tmp_path, key=NAMED["key"])
    assert done.status == 0, done.output
    assert json.loads(done.output)["email"] == "ada@example.org"


@with_keys()
async def test_tinker_auth_login_status_logout(stack: Stack, tmp_path: Path) -> None:
    done = await tinker_command("auth", "login", stack=stack, home=tmp_path, given="tml-wrong\n")
    assert done.status == 1
    assert "holds no key of this server" in done.output

    done = await tinker_command("auth", "login", stack=stack, home=tmp_path, given=f"{NAMED['key']}\n")
    assert done.status == 0, done.output
    assert "Logged in as ada@example.org (tinsmith). Stored API key 'laptop'" in done.output
    stored = json.loads((tmp_path / ".tinker/credentials.json").read_text())
    assert stored["default"] == str(int(owner_of(NAMED["key"])[:12], 16))

    done = await tinker_command("auth", "status", stack=stack, home=tmp_path)
    assert done.status == 0, done.output
    assert "Tinker accessible: yes" in done.output

    done = await tinker_command("auth", "logout", stack=stack, home=tmp_path)
    assert done.status == 0, done.output
    assert "The API key is still active" in done.output  # which is true


@with_keys()
async def test_tinker_auth_logout_does_not_claim_that_a_generated_key_was_deleted(stack: Stack, tmp_path: Path) -> None:
    """Only old command lines have stored such keys; logout wants to delete them on the server."""
    details = {"org_details": {"name": "tinsmith"}, "user_details": {"email": ""}}
    record = {"type": "generated", "key": RIGHT, "name": "old", "details": details}
    (tmp_path / ".tinker").mkdir()
    stored = tmp_path / ".tinker/credentials.json"
    stored.write_text(json.dumps({"version": 1, "default": "1", "keys": {"1": record}}))
    done = await tinker_command("auth", "logout", stack=stack, home=tmp_path)
    assert done.status == 1
    assert "Could not delete the API key on the server" in done.output
    assert json.loads(stored.read_text())["keys"] == {}


@with_keys()
async def test_tinker_auth_status_tells_a_wrong_key(stack: Stack, client: Client, tmp_path: Path) -> None:
    done = await tinker_command("auth", "status", stack=stack, home=tmp_path, key="tml-wrong")
    assert done.status == 1
    assert "Tinker accessible: no" in done.output
    assert "holds no key of this server" in done.output
