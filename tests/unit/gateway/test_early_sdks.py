"""SDKs before 0.14 send other requests and expect other answers. tests/conformance runs the SDKs themselves."""

from __future__ import annotations

from email.utils import parsedate_to_datetime

from tests.unit.gateway.stack import Client, Stack
from tests.unit.gateway.test_weights import save
from tinsmith.v1 import trainer_pb2


async def test_an_archive_is_a_redirect_that_says_when_it_expires(client: Client) -> None:
    """0.14 takes nothing else; newer ones read either the headers or the body."""
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    checkpoint_id = path.removeprefix(f"tinker://{run_id}/")
    reply = await client.get(f"/api/v1/training_runs/{run_id}/checkpoints/{checkpoint_id}/archive")
    assert reply.status_code == 302
    assert reply.headers["location"] == reply.json()["url"]
    assert parsedate_to_datetime(reply.headers["expires"]).isoformat() == reply.json()["expires"].replace("Z", "+00:00")


async def test_checkpoints_of_a_run_are_listed_under_its_first_name_too(client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    old = await client.get(f"/api/v1/models/{run_id}/checkpoints")
    new = await client.get(f"/api/v1/training_runs/{run_id}/checkpoints")
    assert old.json() == new.json()
    assert [one["tinker_path"] for one in old.json()["checkpoints"]] == [path]


async def test_a_load_that_says_nothing_of_the_optimizer_starts_a_new_one(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    receipt = await client.call("load_weights", {"model_id": run_id, "seq_id": 2, "path": path})
    assert (await client.result(receipt))["path"] == path
    request = trainer_pb2.LoadCheckpointRequest.FromString(stack.trainer.models[run_id].requests[2])
    assert not request.load_optimizer


async def test_an_sdk_without_sessions_is_refused_by_name(client: Client) -> None:
    body = {"base_model": "Qwen/Qwen3-8B", "lora_config": {"rank": 8}}
    assert "session_id" in (await client.call("create_model", body, status=400))["detail"]
