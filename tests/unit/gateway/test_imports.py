from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from tests.unit.gateway.stack import BASE_MODEL, Client, Stack
from tests.unit.gateway.test_runs import get

ARCHIVE = bytes(range(256)) * 1000


async def body() -> AsyncIterator[bytes]:
    """Without a length: it comes as it is made."""
    for start in range(0, len(ARCHIVE), 50_000):
        yield ARCHIVE[start : start + 50_000]


async def import_archive(client: Client, *, content: object = ARCHIVE, **query: object) -> tuple[int, dict]:
    reply = await client.post(
        "/api/v1/checkpoints/import",
        params={"base_model": BASE_MODEL, "name": "mine", **query},  # type: ignore[dict-item]
        content=content,  # type: ignore[arg-type]
    )
    return reply.status_code, reply.json()


def refused_before_it_is_sent(url: str, *, num_bytes: int) -> tuple[int, str]:
    """As urllib does it: the whole body, and then the answer, on a connection that ends with it."""
    address = urlsplit(url)
    with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=20)) as connection:  # type: ignore[arg-type]
        headers = {"Connection": "close"}
        connection.request("POST", "/api/v1/checkpoints/import?name=a%20b", bytes(num_bytes), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.mark.parametrize("num_bytes", [1000, 400_000, 30_000_000])
async def test_a_client_that_sends_all_before_listening_hears_the_refusal(stack: Stack, num_bytes: int) -> None:
    for _ in range(3):
        status, said = await asyncio.to_thread(refused_before_it_is_sent, stack.url, num_bytes=num_bytes)
        assert status == 400
        assert "name: 'a b'" in said or "base_model" in said


@pytest.mark.gateway(reap_interval_s=0.2)
async def test_an_imported_adapter_is_a_run_that_has_ended(stack: Stack, client: Client) -> None:
    status, answer = await import_archive(client, content=body(), ttl_seconds=3600)
    assert status == 200, answer
    assert b"".join(stack.trainer.imported) == ARCHIVE
    assert len(stack.trainer.imported) > 1  # it was never held whole
    run_id, kind, name = answer["path"].removeprefix("tinker://").split("/")
    assert (kind, name) == ("weights", "mine")
    assert answer["notes"] == ["bfloat16 was converted to float32"]

    run = await get(client, f"training_runs/{run_id}")
    assert (run["base_model"], run["lora_rank"]) == (BASE_MODEL, 8)
    (checkpoint,) = (await get(client, f"training_runs/{run_id}/checkpoints"))["checkpoints"]
    assert checkpoint["tinker_path"] == answer["path"]
    assert checkpoint["expires_at"] is not None
    session = await get(client, f"sessions/{run_id.partition(':')[0]}")
    assert (session["display_name"], session["training_run_ids"]) == ("import", [run_id])
    entries = (await get(client, "audit"))["entries"]
    assert (entries[-1]["event"], entries[-1]["tinker_path"]) == ("checkpoint_import", answer["path"])

    model_id = await client.model(await client.session())  # the trainer goes on
    assert model_id not in stack.trainer.deleted_models
    assert run_id not in stack.trainer.deleted_models


@pytest.mark.parametrize(
    ("query", "match"),
    [
        ({"name": "a/b"}, "name: 'a/b'"),
        ({"name": ""}, "name: ''"),
        ({"base_model": "huge"}, "'huge' cannot be trained here"),
        ({"ttl_seconds": 5}, "ttl_seconds: 5 is outside 3600"),
        ({"ttl_seconds": "soon"}, "ttl_seconds: "),
        ({"overwrite": "true"}, "overwrite: "),
        ({"name": "refused"}, "tensor 'x': DoRA cannot be imported"),
    ],
)
async def test_a_wrong_import_is_answered_at_once_and_leaves_no_run(
    client: Client, query: dict[str, object], match: str
) -> None:
    status, answer = await import_archive(client, **query)
    assert status == 400
    assert match in answer["detail"]
    assert (await get(client, "training_runs"))["training_runs"] == []


async def test_a_compressed_body_is_refused_by_name(client: Client) -> None:
    reply = await client.post("/api/v1/checkpoints/import", content=b"x", headers={"content-encoding": "gzip"})
    assert (reply.status_code, "content-encoding 'gzip'" in reply.json()["detail"]) == (400, True)


@pytest.mark.gateway(max_import_bytes=100_000)
async def test_a_larger_archive_is_answered_413_and_stored_nowhere(stack: Stack, client: Client) -> None:
    status, answer = await import_archive(client, content=body())
    assert (status, "max_import_bytes" in answer["detail"]) == (413, True)
    assert stack.trainer.checkpoints == {}


async def test_a_trainer_that_is_away_is_a_503(stack: Stack, client: Client) -> None:
    await stack.trainer_backend.stop()
    started = time.monotonic()
    status, _ = await import_archive(client)
    assert (status, time.monotonic() - started < 10) == (503, True)
