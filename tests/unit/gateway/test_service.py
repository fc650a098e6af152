from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.config import DATABASE, GatewayConfig
from gateway.database.store import Store
from gateway.gateway import Gateway, StartError
from gateway.metrics import Metrics
from gateway.tenants.keys import Keys, id_of
from tests.support.waiting import until
from tests.unit.gateway.stack import ALIAS, BASE_MODEL, Client, Stack
from tinsmith.v1 import trainer_pb2, types_pb2


async def test_service_endpoints(client: Client) -> None:
    assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}
    flags = await client.call("client/config", {"sdk_version": "0.38.0"})
    assert flags == {
        "proto_compress_fwdbwd": False,
        "fwdbwd_max_chunk_len": 4096,
        "fwdbwd_max_chunk_bytes_count": 32 * 2**20,
        "pjwt_auth_enabled": False,
        "sample_use_retrieve_futures": True,
        "sample_join_sampling_session": True,
        "custom_loss_server_side": True,
        "use_pyqwest_transport": True,
    }
    assert await client.call("client/dynamic_config", {"sdk_version": "0.38.0"}) == {"sample_cancel_enabled": True}
    assert await client.call("telemetry", {"events": []}) == {"status": "accepted"}
    models = (await client.get("/api/v1/get_server_capabilities")).json()["supported_models"]
    assert {"model_name": ALIAS, "max_context_length": 2048, "trainable": True, "sampleable": True} in models
    assert BASE_MODEL in [model["model_name"] for model in models]


@pytest.mark.parametrize(("python", "can"), [("3.11.7", False), ("3.12.0", True), ("4.0", True), ("unknown", True)])
async def test_the_transport_of_the_sdk_is_one_that_can_be_cancelled(client: Client, python: str, can: bool) -> None:
    headers = {"x-stainless-runtime-version": python}
    reply = await client.post("/api/v1/client/config", json={"sdk_version": "0.38.0"}, headers=headers)
    assert reply.json()["use_pyqwest_transport"] is can


async def test_pictures_of_a_batch_are_counted_as_the_trainer_counts_them(stack: Stack, client: Client) -> None:
    stack.trainer.picture_counting = trainer_pb2.PictureCounting(
        rule="area", settings={"patch_size": 4, "merge_size": 2, "min_pixels": 128, "max_pixels": 2048}
    )
    await stack.gateway.clients.trainers[0].ask()
    header = struct.pack(">8sI4sIIBBBBBI", b"\x89PNG\r\n\x1a\n", 13, b"IHDR", 37, 21, 8, 2, 0, 0, 0, 0)
    image = types_pb2.Chunk(image=types_pb2.Image(data=header, format="png"))
    expected = types_pb2.Chunk(image=types_pb2.Image(data=header, format="png", expected_tokens=4))
    text = types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=b"\1\0\0\0"))
    model_id = await client.model(await client.session())
    batch = trainer_pb2.ForwardBackwardRequest(
        model_id=model_id,
        seq_id=1,
        loss_fn="cross_entropy",
        data=[types_pb2.Datum(model_input=[image, expected, text])],
    )
    headers = {"content-type": "application/x-protobuf"}
    reply = await client.post("/api/v1/forward_backward", content=batch.SerializeToString(), headers=headers)
    await client.result(reply.json())
    assert "gateway_trained_tokens_total 20.0" in (await client.get("/metrics")).text


async def test_unknown_paths_are_named(client: Client) -> None:
    reply = await client.post("/api/v1/no/such", json={})
    assert reply.status_code == 404
    assert "POST /api/v1/no/such" in reply.json()["detail"]
    reply = await client.get("/api/v1/asample")
    assert reply.status_code == 405
    assert "GET" in reply.json()["detail"]


async def test_metrics_count_requests_and_tokens(client: Client) -> None:
    model_id = await client.model(await client.session())
    await client.result((await client.forward_backward(model_id, 1)).json())
    text = (await client.get("/metrics")).text
    assert "gateway_trained_tokens_total 3.0" in text
    assert 'gateway_requests_total{method="POST",route="forward_backward",status="200"} 1.0' in text
    assert 'gateway_pending_futures{kind="forward_backward"} 0.0' in text


@pytest.mark.gateway(api_keys=[SecretStr("tml-right"), SecretStr("tml-other")])
async def test_keys_are_checked(stack: Stack, client: Client) -> None:
    for headers, status in (
        ({}, 401),
        ({"x-api-key": "tml-wrong"}, 401),
        ({"x-api-key": "tml-right"}, 200),
        ({"X-API-Key": "tml-other"}, 200),
    ):
        reply = httpx.Response(0)
        async with httpx.AsyncClient(base_url=stack.url) as raw:
            reply = await raw.post("/api/v1/create_session", json={}, headers=headers)
            assert (await raw.get("/api/v1/healthz")).status_code == 200
        assert reply.status_code == status
        if status == 401:
            assert "X-API-Key" in reply.json()["detail"]


async def test_a_public_address_needs_a_key_of_the_configuration_or_of_the_database(tmp_path: Path) -> None:
    async def start(host: str, **settings: Any) -> None:
        gateway = Gateway(GatewayConfig(host=host, state_dir=tmp_path, trainers=[], samplers=[], **settings))
        try:
            await gateway.start()
        finally:
            await gateway.stop()

    for host in ("127.0.0.1", "localhost", "::1"):
        await start(host)
    for host in ("0.0.0.0", "::", "gateway.example"):
        with pytest.raises(StartError, match=r"api_keys must name at least one key .*tinsmith keys create"):
            await start(host)
        await start(host, api_keys=[SecretStr("tml-a")])
    store = Store(f"sqlite+aiosqlite:///{tmp_path / DATABASE}", Metrics())
    _, row = await Keys(store).create("ada")
    await start("0.0.0.0")
    await Keys(store).revoke(id_of(row.key_hash))
    await store.close()
    await start("0.0.0.0")  # where nobody can come in; it does not open again


@pytest.mark.gateway(long_poll_s=30.0)
async def test_stop_ends_open_long_polls(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    polls = []
    for seq_id in range(2, 22):
        await client.forward_backward(model_id, seq_id)
        polls.append(asyncio.create_task(client.poll(f"{model_id}:{seq_id}")))
    await asyncio.sleep(0.3)
    async with asyncio.timeout(20):  # polls would take 30
        await stack.stop_gateway()
    for reply in await asyncio.gather(*polls):
        assert reply.json()["type"] == "try_again"


async def test_sigterm_ends_the_process_with_long_polls_open(stack: Stack, tmp_path: Path) -> None:
    await stack.stop_gateway()
    settings = {
        "GATEWAY_PORT": str(stack.port),
        "GATEWAY_TRAINERS": f'["127.0.0.1:{stack.trainer_backend.port}"]',
        "GATEWAY_SAMPLERS": f'["127.0.0.1:{stack.sampler_backend.port}"]',
        "GATEWAY_STATE_DIR": str(tmp_path / "process"),
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", env=os.environ | settings)
    async with Client(base_url=stack.url, timeout=40, headers={"x-api-key": "tml-test"}) as client:
        async with asyncio.timeout(120):
            while True:
                try:
                    if (await client.get("/api/v1/get_server_capabilities")).json()["supported_models"]:
                        break
                except httpx.ConnectError:
                    pass
                await asyncio.sleep(0.1)
        model_id = await client.model(await client.session())
        await client.forward_backward(model_id, 2)
        poll = asyncio.create_task(client.poll(f"{model_id}:2"))
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):  # a stop that hangs ends itself after 6 s, with status 1
            assert await process.wait() == 0
        assert (await poll).json()["type"] == "try_again"


async def test_the_gateway_starts_before_its_services(stack: Stack, client: Client) -> None:
    await stack.stop_gateway()
    await stack.trainer_backend.stop()
    await stack.sampler_backend.stop()
    await stack.start_gateway(submit_timeout_s=0.2)
    session_id = await client.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    await client.call("create_model", body, status=503)
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    await client.call("create_sampling_session", sampler, status=503)
    await stack.trainer_backend.start()
    await stack.sampler_backend.start()
    assert stack.server is not None
    clients = stack.gateway.clients
    await clients.settle(lambda: clients.serving(BASE_MODEL))
    await stack.server.app.state.gateway.clients.samplers.wait(BASE_MODEL)
    await client.model(session_id)
    await client.sampling_session(session_id)


async def supported(client: Client) -> dict[str, dict[str, object]]:
    models = (await client.get("/api/v1/get_server_capabilities")).json()["supported_models"]
    return {model["model_name"]: model for model in models}


async def test_a_model_that_its_trainer_cannot_train_is_sampled_only(stack: Stack, client: Client) -> None:
    assert (await supported(client))[BASE_MODEL]["trainable"] is True
    stack.trainer.trainable_groups = []
    await stack.restart_gateway()
    model = (await supported(client))[BASE_MODEL]
    # The sampler's context: the trainer's, which is larger, does not matter.
    assert model == {"model_name": BASE_MODEL, "max_context_length": 2048, "trainable": False, "sampleable": True}


async def test_a_model_that_is_trained_one_sequence_at_a_time_says_why(stack: Stack, client: Client) -> None:
    assert "one_by_one" not in (await supported(client))[BASE_MODEL]
    stack.trainer.one_by_one = "a layer of it does not pack"
    await stack.restart_gateway()
    assert (await supported(client))[BASE_MODEL]["one_by_one"] == "a layer of it does not pack"


async def test_capabilities_stay_while_a_service_is_down_and_follow_it_when_it_is_back(
    stack: Stack, client: Client
) -> None:
    before = await supported(client)
    await stack.trainer_backend.stop()
    await stack.sampler_backend.stop()
    assert await supported(client) == before
    stack.trainer.trainable_groups = []
    await stack.trainer_backend.start()

    async def is_not_trainable() -> bool:
        return not (await supported(client))[BASE_MODEL]["trainable"]

    await until(is_not_trainable)
