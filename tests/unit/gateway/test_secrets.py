"""No log and no answer contains a secret, whatever is asked: all levels from DEBUG, with secrets known to the test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from tinker.types.generic_event import GenericEvent

from gateway.config import GatewayConfig
from gateway.gateway import Gateway, StartError
from sampler_service.config import SamplerConfig
from tests.unit.gateway.stack import Client, Stack, batch, sample_body
from tests.unit.gateway.test_weights import save
from tinsmith.rpc import logs
from trainer_service.config import TrainerConfig

KEY = "tml-known-secret-key-0001"
WRONG_KEY = "tml-known-wrong-key-0002"
SERVICE_KEY = "known-service-secret-0003"
JWT_SECRET = "known-jwt-secret-0004-" + "x" * 32
DOWNLOAD_SECRET = "known-download-secret-0005"
PASSWORD = "known-database-password-0006"
SECRETS = {KEY, WRONG_KEY, SERVICE_KEY, JWT_SECRET, DOWNLOAD_SECRET, PASSWORD}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.handler.setFormatter(logs.JsonFormatter())
    logs.quieten_libraries()
    ours = ("httpx", "httpcore")  # this test's own client writes what it asks for
    for name in ours:
        logging.getLogger(name).setLevel(logging.WARNING)
    with caplog.at_level(logging.DEBUG):
        yield caplog
    for name in ours:
        logging.getLogger(name).setLevel(logging.NOTSET)


async def answers(stack: Stack, client: Client) -> list[httpx.Response]:
    """All kinds of paths: what works, what is refused, what is broken."""
    made: list[httpx.Response] = []

    async def keep(response: httpx.Response) -> None:
        await response.aread()
        made.append(response)

    client.event_hooks = {"response": [keep]}
    event = GenericEvent(event_id="e", event="GENERIC_EVENT", event_name="x", event_session_index=0,
                         severity="DEBUG", timestamp=datetime.now(UTC), event_data={"api_key": KEY})  # fmt: skip
    sent = {"session_id": "s", "platform": "linux", "sdk_version": "0", "events": [event.model_dump(mode="json")]}
    await client.post("/api/v1/telemetry", json=sent)
    session_id = await client.session()
    model_id = await client.model(session_id)
    await client.result((await client.forward_backward(model_id, 1)).json())
    path = (await save(client, model_id, 2))["path"]
    sampling = await client.sampling_session(session_id, model_path=path)
    await client.result((await client.post("/api/v1/asample", json=sample_body(sampling, 0))).json())
    run = f"/api/v1/training_runs/{path.removeprefix('tinker://').split('/', 1)[0]}"
    archive = await client.get(f"{run}/checkpoints/{path.split('/', 3)[3]}/archive")
    async with httpx.AsyncClient() as anonymous:
        url = archive.json()["url"]
        await anonymous.get(url)
        made.append(await anonymous.get(url.replace("signature=", "signature=0")))
    token = (await client.post("/api/v1/auth/token", json={})).json()["jwt"]
    await client.get("/api/v1/sessions", headers={"x-api-key": "", "authorization": f"Bearer {token}"})
    for headers in ({"x-api-key": WRONG_KEY}, {"x-api-key": token[:-4]}, {"authorization": f"Bearer {WRONG_KEY}"}):
        await client.get("/api/v1/sessions", headers={"x-api-key": "", **headers})
    for body in (b"{", b"[]", b'{"type": 3}', b"{" * 100_000):
        await client.post("/api/v1/create_session", content=body, headers={"authorization": f"Bearer {KEY}"})
    await client.post("/api/v1/forward_backward", content=b"\xff", headers={"content-type": "application/x-protobuf"})
    await client.post("/v1/chat/completions", json={"model": 1})
    await client.get("/nowhere", headers={"cookie": KEY})
    await client.get("/metrics")
    await stack.trainer_backend.stop()
    await client.post("/api/v1/forward_backward", content=batch(model_id, 9).SerializeToString(),
                      headers={"content-type": "application/x-protobuf"})  # fmt: skip
    await stack.trainer_backend.start()
    SECRETS_SEEN.update({token, url.partition("signature=")[2]})
    return made


SECRETS_SEEN: set[str] = set()


async def test_no_secret_is_in_a_log_or_in_an_answer(
    stack: Stack, client: Client, log: pytest.LogCaptureFixture
) -> None:
    await stack.restart_gateway(
        submit_timeout_s=0.5,
        api_keys=[KEY],
        service_key=SecretStr(SERVICE_KEY),
        jwt_auth=True,
        jwt_secret=SecretStr(JWT_SECRET),
        download_secret=SecretStr(DOWNLOAD_SECRET),
    )
    client.headers["x-api-key"] = KEY
    made = await answers(stack, client)
    assert {response.status_code for response in made} >= {200, 302, 400, 401, 403, 404}
    await asyncio.sleep(1.1)  # the ledger writes what it has once a second
    written = log.text
    assert '"level": "DEBUG"' in written
    assert [secret for secret in SECRETS | SECRETS_SEEN if secret in written] == []
    told = "\n".join(
        f"{response.headers}\n{response.text}" for response in made if "/auth/token" not in str(response.url)
    )
    assert [secret for secret in SECRETS if secret in told] == []


async def test_secrets_that_the_gateway_makes_are_in_no_log(stack: Stack, log: pytest.LogCaptureFixture) -> None:
    """They go through the database's driver, which writes its arguments at DEBUG."""
    await stack.restart_gateway(api_keys=[KEY], jwt_auth=True)
    assert stack.server is not None
    store = stack.server.app.state.gateway.store
    made = [await store.settings.get(name, default="") for name in ("jwt_secret", "download_secret")]
    assert all(len(secret) >= 32 for secret in made)
    assert [secret for secret in made if secret in log.text] == []


async def test_a_database_that_cannot_be_reached_is_named_without_its_password(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("asyncpg")
    url = f"postgresql+asyncpg://tinsmith:{PASSWORD}@127.0.0.1:1/x"
    gateway = Gateway(GatewayConfig(state_dir=tmp_path, database_url=SecretStr(url)))
    with pytest.raises(StartError) as refused:
        await gateway.start()
    await gateway.stop()
    assert "//***@127.0.0.1" in str(refused.value)
    assert PASSWORD not in f"{refused.value}{log.text}"


@pytest.mark.parametrize(
    ("cls", "facts"),
    [
        (GatewayConfig, {"jwt_secret": JWT_SECRET, "download_secret": DOWNLOAD_SECRET,
                         "database_url": f"postgresql+asyncpg://u:{PASSWORD}@h/x"}),
        (TrainerConfig, {"base_model": "m"}),
        (SamplerConfig, {"base_model": "m"}),
    ],
)  # fmt: skip
def test_a_printed_configuration_hides_its_secrets(cls: Any, facts: dict[str, str]) -> None:
    """The services print it when they start, in one of these forms."""
    keys = [KEY, {"key": WRONG_KEY, "name": "shown"}]
    config = cls(api_keys=keys, service_key=SERVICE_KEY, **facts)
    for text in (str(config), repr(config), config.model_dump_json()):
        assert "shown" in text
        assert [secret for secret in SECRETS if secret in text] == []
