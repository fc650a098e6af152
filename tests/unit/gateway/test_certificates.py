"""Certificates through the management API, by checkpoint and by sampler."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.gateway.stack import BASE_MODEL, Client, Stack
from tests.unit.gateway.test_checkpoints import ask, save_for_sampler
from tests.unit.gateway.test_weights import save
from tinsmith.rpc.times import duration, timestamp
from tinsmith.v1 import types_pb2


def issue(stack: Stack, version_id: str, *, max_gap: float = 2.5e-6) -> None:
    gap = types_pb2.SamplerGap(
        address="10.0.0.7:8002",
        engine="torch",
        max_gap=max_gap,
        mean_gap=max_gap / 4,
        num_tokens=60,
        applied=1,
        factor=1,
    )
    stack.trainer.certificates[version_id] = types_pb2.PublishCertificate(
        version_id=version_id,
        weights_hash="c0ffee",
        num_bytes=4096,
        publish_time=duration(0.02),
        limit=0.01,
        mean_limit=0.003,
        change=0.5,
        passed=max_gap <= 0.01,
        samplers=[gap],
        issued_at=timestamp(1_700_000_000.5),
    )


async def of_sampler(client: Client, sampler_id: str, *, status: int = 200) -> Any:
    reply = await client.get(f"/api/v1/samplers/{sampler_id}/certificate")
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_a_published_checkpoint_shows_its_certificate(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    path = await save_for_sampler(client, run_id, 1)
    issue(stack, f"{run_id}@1")
    assert await ask(client, "GET", path, "certificate") == {
        "version_id": f"{run_id}@1",
        "passed": True,
        "limit": 0.01,
        "mean_limit": 0.003,
        "change": 0.5,
        "samplers": [
            {
                "address": "10.0.0.7:8002",
                "engine": "torch",
                "max_gap": 2.5e-6,
                "mean_gap": 6.25e-7,
                "num_tokens": 60,
                "applied": "yes",
                "factor": 1.0,
            }
        ],
        "weights_hash": "c0ffee",
        "num_bytes": 4096,
        "publish_seconds": 0.02,
        "issued_at": "2023-11-14T22:13:20.500000Z",
    }


async def test_a_gap_that_is_no_number_is_a_text(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    path = await save_for_sampler(client, run_id, 1)
    issue(stack, f"{run_id}@1", max_gap=math.inf)
    certificate = await ask(client, "GET", path, "certificate")
    assert not certificate["passed"]
    assert certificate["samplers"][0]["max_gap"] == "inf"


async def test_what_was_never_published_has_none(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    assert "never published" in (await ask(client, "GET", path, "certificate", status=404))["detail"]
    await ask(client, "GET", f"{path}0", "certificate", status=404)


async def test_a_sampler_shows_that_of_the_version_it_samples_from(stack: Stack, client: Client) -> None:
    session = await client.session()
    run_id = await client.model(session)
    body = {"model_id": run_id, "seq_id": 1, "sampling_session_seq_id": 0}
    saved = await client.result(await client.call("save_weights_for_sampler", body))
    issue(stack, f"{run_id}@1")
    assert (await of_sampler(client, saved["sampling_session_id"]))["version_id"] == f"{run_id}@1"
    made = await client.call(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 1, "base_model": BASE_MODEL},
    )
    assert "base model" in (await of_sampler(client, made["sampling_session_id"], status=404))["detail"]
    await of_sampler(client, "none:sample:0", status=404)


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_sampler_keeps_it_when_its_checkpoint_is_gone(stack: Stack, client: Client, replaced: bool) -> None:
    session = await client.session()
    run_id = await client.model(session)
    path = (await save(client, run_id, 1))["path"]
    made = await client.call(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    )
    issue(stack, f"{run_id}@1")
    if replaced:
        await save(client, run_id, 2, overwrite=True)
        issue(stack, f"{run_id}@2", max_gap=1e-7)
    else:
        await ask(client, "DELETE", path)
    assert (await of_sampler(client, made["sampling_session_id"]))["version_id"] == f"{run_id}@1"
