from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tinker import types

from gateway.views import time_text
from tests.unit.gateway.commits import Statements
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack
from tests.unit.gateway.test_weights import save


async def get(client: Client, path: str, *, status: int = 200, **query: Any) -> Any:
    reply = await client.get(f"/api/v1/{path}", params=query or None)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_runs_are_listed_newest_first_in_pages_that_know_their_number(client: Client) -> None:
    session_id = await client.session()
    runs = [await client.model(session_id, seq=n, user_metadata={"n": str(n)}) for n in range(3)]
    first = types.TrainingRunsResponse.model_validate(await get(client, "training_runs", limit=2))
    assert [run.training_run_id for run in first.training_runs] == runs[:0:-1]
    assert (first.cursor.offset, first.cursor.limit, first.cursor.total_count) == (0, 2, 3)
    rest = types.TrainingRunsResponse.model_validate(await get(client, "training_runs", limit=2, offset=2))
    (run,) = rest.training_runs
    assert (run.training_run_id, run.base_model, run.lora_rank, run.corrupted) == (runs[0], BASE_MODEL, 8, False)
    assert run.model_owner == "tml:organization_user:local"
    assert run.user_metadata == {"n": "0"}


async def test_a_run_knows_its_last_checkpoints_and_its_last_request(client: Client) -> None:
    run_id = await client.model(await client.session())
    before = types.TrainingRun.model_validate(await get(client, f"training_runs/{run_id}"))
    assert before.last_checkpoint is None
    await save(client, run_id, 1, "one")
    await save(client, run_id, 2, "two", user_metadata={"k": "v"}, ttl_seconds=3600)
    body = {"model_id": run_id, "seq_id": 3, "path": "three"}
    await client.result(await client.call("save_weights_for_sampler", body))
    after = types.TrainingRun.model_validate(await get(client, f"training_runs/{run_id}"))
    assert after.last_checkpoint is not None
    assert after.last_sampler_checkpoint is not None
    assert after.last_checkpoint.checkpoint_id == "weights/two"
    assert after.last_checkpoint.tinker_path == f"tinker://{run_id}/weights/two"
    assert after.last_checkpoint.user_metadata == {"k": "v"}
    assert after.last_checkpoint.expires_at is not None
    assert 3590 < after.last_checkpoint.expires_at.timestamp() - time.time() <= 3600
    assert after.last_sampler_checkpoint.checkpoint_id == "sampler_weights/three"
    assert after.last_request_time > before.last_request_time


async def test_a_run_that_was_refused_is_not_listed(client: Client) -> None:
    body = {"session_id": await client.session(), "model_seq_id": 0, "base_model": BASE_MODEL}
    failure = await client.result(await client.call("create_model", body | {"lora_config": {"rank": 4000}}))
    assert "4000" in failure["error"]
    assert (await get(client, "training_runs"))["training_runs"] == []


async def test_runs_of_a_project(client: Client) -> None:
    projects = {
        project: await client.model((await client.call("create_session", {"project_id": project}))["session_id"])
        for project in (None, "p", "q")
    }
    for project in ("p", "default"):
        listed = await get(client, "training_runs", project_id=project)
        expected = projects[None if project == "default" else project]
        assert [run["training_run_id"] for run in listed["training_runs"]] == [expected]


@pytest.mark.gateway(api_keys=["tml-test", {"key": "tml-other", "admin": True}])
async def test_scopes_tell_an_admins_own_from_everyones(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    path = (await save(client, run_id, 1))["path"]
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-other"}) as other:
        for listing in ("training_runs", "sessions"):
            assert (await get(other, listing))[listing] == []
            assert len((await get(other, listing, access_scope="accessible"))[listing]) == 1
        assert (await get(other, "checkpoints"))["cursor"]["total_count"] == 0
        for one in (f"training_runs/{run_id}", f"sessions/{session_id}"):
            assert "accessible" in (await get(other, one, status=404))["detail"]
            await get(other, one, access_scope="accessible")
        assert len((await get(other, f"training_runs/{run_id}/checkpoints"))["checkpoints"]) == 1
        await other.call("weights_info", {"tinker_path": path})
    assert (await get(client, "checkpoints"))["cursor"]["total_count"] == 1


async def test_checkpoints_of_a_run_and_of_a_user(client: Client) -> None:
    session_id = await client.session()
    runs = [await client.model(session_id, seq=n) for n in range(2)]
    for run_id in runs:
        await save(client, run_id, 1, "one")
        body = {"model_id": run_id, "seq_id": 2, "path": "two"}
        await client.result(await client.call("save_weights_external", body))
    listed = types.CheckpointsListResponse.model_validate(await get(client, f"training_runs/{runs[0]}/checkpoints"))
    assert [one.checkpoint_id for one in listed.checkpoints] == ["weights/one", "external_weights/two"]
    assert [one.checkpoint_type for one in listed.checkpoints] == ["training", "external"]
    assert [one.size_bytes for one in listed.checkpoints] == [100, 100]
    assert not any(one.public for one in listed.checkpoints)
    page = types.CheckpointsListResponse.model_validate(await get(client, "checkpoints", limit=1, offset=2))
    assert [one.tinker_path for one in page.checkpoints] == [f"tinker://{runs[0]}/external_weights/two"]
    assert page.cursor is not None
    assert page.cursor.total_count == 4


@pytest.mark.parametrize(("version", "count"), [("0.29.1", 1), ("0.30.0", 2), ("0.38.0", 2), ("", 2)])
async def test_an_sdk_sees_only_types_of_checkpoints_that_it_knows(client: Client, version: str, count: int) -> None:
    run_id = await client.model(await client.session())
    await save(client, run_id, 1, "one")
    body = {"model_id": run_id, "seq_id": 2, "path": "two"}
    await client.result(await client.call("save_weights_external", body))
    headers = {"x-stainless-package-version": version}
    for path in (f"training_runs/{run_id}/checkpoints", "checkpoints"):
        reply = (await client.get(f"/api/v1/{path}", headers=headers)).json()
        assert len(reply["checkpoints"]) == count


@pytest.mark.parametrize(
    ("path", "query", "part"),
    [
        ("training_runs", {"limit": 1001}, "limit"),
        ("training_runs", {"limit": "x"}, "limit"),
        ("training_runs", {"offset": -1}, "offset"),
        ("training_runs", {"access_scope": "mine"}, "access_scope"),
        ("checkpoints", {"limit": -1}, "limit"),
        ("sessions", {"limit": 1001}, "limit"),
    ],
)
async def test_queries_that_make_no_sense_are_refused_by_name(
    client: Client, path: str, query: dict[str, Any], part: str
) -> None:
    assert (await get(client, path, status=400, **query))["detail"].startswith(part)


@pytest.mark.parametrize("path", ["training_runs/none:train:0", "training_runs/none:train:0/checkpoints"])
async def test_unknown_runs(client: Client, path: str) -> None:
    assert "none:train:0" in (await get(client, path, status=404))["detail"]


async def test_reading_runs_writes_nothing_and_shows_the_last_request(stack: Stack, client: Client) -> None:
    assert stack.server is not None
    gateway = stack.server.app.state.gateway
    run_id = await client.model(await client.session())
    await client.result((await client.forward_backward(run_id, 1)).json())
    for task in gateway.tasks:
        task.cancel()  # what writes in the background
    await asyncio.gather(*gateway.tasks, return_exceptions=True)
    await gateway.ledger.flush()
    gateway.ledger.touch(run_id)
    touched_at = gateway.ledger.touched_at(run_id)
    statements = Statements(gateway.store)
    (listed,) = (await get(client, "training_runs"))["training_runs"]
    assert await get(client, f"training_runs/{run_id}") == listed
    assert listed["last_request_time"] == time_text(touched_at)
    assert [each for each in statements.of_all if not each.lstrip().upper().startswith("SELECT")] == []
