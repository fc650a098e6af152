"""HTTPS of the gateway, and what goes between it and its services, with real certificates."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from gateway.config import GatewayConfig
from tests.support.certificates import Made, make
from tests.unit.gateway import sdk_programs
from tests.unit.gateway.stack import BASE_MODEL, Stack
from tests.unit.gateway.test_sdk import run_program
from tinsmith.rpc.tls import pinned

HEALTHCHECK = Path(__file__).parents[3] / "docker" / "healthcheck.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def stack(tmp_path: Path, made: Made) -> AsyncIterator[Stack]:
    """All of it encrypted."""
    stack = Stack(tmp_path)
    for backend in (stack.trainer_backend, stack.sampler_backend):
        backend.certificates = made.certificates(backend.kind)
        await backend.start()
    files = made.certificates("gateway")
    https = {"tls_cert": files.cert, "tls_key": files.key}
    await stack.start_gateway(**https, grpc_ca=files.ca, grpc_cert=files.cert, grpc_key=files.key)
    yield stack
    await stack.stop_gateway()
    await stack.trainer_backend.stop()
    await stack.sampler_backend.stop()


def trusting(*authorities: Path) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for authority in authorities:
        context.load_verify_locations(authority)
    return context


async def ask(stack: Stack, context: ssl.SSLContext) -> httpx.Response:
    async with httpx.AsyncClient(verify=context, trust_env=False) as client:
        return await client.get(f"https://127.0.0.1:{stack.port}/api/v1/get_server_capabilities")


async def test_a_client_that_trusts_the_authority_is_served(stack: Stack, made: Made) -> None:
    """And the gateway has reached trainer and sampler, or it would not name the model."""
    reply = await ask(stack, trusting(made.good / "ca.pem"))
    assert BASE_MODEL in [model["model_name"] for model in reply.json()["supported_models"]]


@pytest.mark.slow
async def test_the_sdk_trains_and_samples_over_https(stack: Stack, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(made.good / "ca.pem"))
    await run_program(sdk_programs.train_save_load_and_sample, f"https://127.0.0.1:{stack.port}")


@pytest.mark.parametrize("which", ["another", "none"])
async def test_a_client_that_does_not_trust_it_refuses(stack: Stack, made: Made, which: str) -> None:
    context = trusting(*([made.foreign / "ca.pem"] if which == "another" else []))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await ask(stack, context)


async def test_an_expired_certificate_is_refused_by_clients(stack: Stack, made: Made) -> None:
    expired = made.certificates("gateway", made.expired)
    await stack.restart_gateway(tls_cert=expired.cert, tls_key=expired.key)
    with pytest.raises(httpx.ConnectError, match="expired"):
        await ask(stack, trusting(made.good / "ca.pem"))


async def test_plain_http_is_refused(stack: Stack) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"http://127.0.0.1:{stack.port}/api/v1/healthz")


async def test_old_versions_of_tls_are_refused(stack: Stack, made: Made) -> None:
    context = trusting(made.good / "ca.pem")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        await ask(stack, context)


@pytest.mark.parametrize("which", ["expired", "foreign", "none"])
async def test_a_gateway_that_cannot_prove_itself_reaches_no_service(stack: Stack, made: Made, which: str) -> None:
    await stack.stop_gateway()
    folder = {"expired": made.expired, "foreign": made.foreign, "none": made.good}[which]
    files = made.certificates("gateway", folder)
    grpc = {"grpc_ca": files.ca, "grpc_cert": files.cert, "grpc_key": files.key}
    stack.settings |= grpc if which != "none" else dict.fromkeys(grpc)
    stack.settings |= {"submit_timeout_s": 0.5}
    trainer, stack.trainer_backend.server = stack.trainer_backend.server, None  # nobody waits for it
    await stack.start_gateway()
    stack.trainer_backend.server = trainer
    async with httpx.AsyncClient(verify=trusting(made.good / "ca.pem"), trust_env=False, timeout=20) as client:
        reply = await client.get(f"https://127.0.0.1:{stack.port}/api/v1/get_server_capabilities")
    assert reply.json()["supported_models"] == []


async def test_the_containers_health_check_believes_the_gateways_own_certificate_only(
    stack: Stack, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> int:
        script = [sys.executable, str(HEALTHCHECK), "gateway"]
        return await (await asyncio.create_subprocess_exec(*script, stderr=asyncio.subprocess.DEVNULL)).wait()

    monkeypatch.setenv("GATEWAY_PORT", str(stack.port))
    assert await check() == 1
    monkeypatch.setenv("GATEWAY_TLS_CERT", str(made.good / "gateway.pem"))
    assert await check() == 0
    monkeypatch.setenv("GATEWAY_TLS_CERT", str(made.foreign / "gateway.pem"))
    assert await check() == 1


async def test_a_pinned_certificate_is_good_for_any_name(stack: Stack, made: Made) -> None:
    async with httpx.AsyncClient(verify=pinned(made.good / "gateway.pem"), trust_env=False) as client:
        reply = await client.get(
            f"https://127.0.0.1:{stack.port}/api/v1/healthz", extensions={"sni_hostname": "elsewhere.example"}
        )
    assert reply.status_code == 200


def test_a_certificate_without_its_key_is_refused(made: Made) -> None:
    files = made.certificates("gateway")
    with pytest.raises(ValidationError, match="tls_cert and tls_key belong together"):
        GatewayConfig(tls_cert=files.cert)
    with pytest.raises(ValidationError, match="are not a certificate and its key"):
        GatewayConfig(tls_cert=files.cert, tls_key=made.certificates("trainer").key)
