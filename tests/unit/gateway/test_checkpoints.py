from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any

import pytest

from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, sample_body
from tests.unit.gateway.test_runs import get
from tests.unit.gateway.test_weights import save

pytestmark = pytest.mark.usefixtures("short_flushes")


async def ask(client: Client, method: str, checkpoint: str, action: str = "", *, status: int = 200, **body: Any) -> Any:
    """`checkpoint`: a tinker path."""
    run_id, name = checkpoint.removeprefix("tinker://").split("/", 1)
    url = f"/api/v1/training_runs/{run_id}/checkpoints/{name}" + (f"/{action}" if action else "")
    reply = await client.request(method, url, json=body or None)
    assert reply.status_code == status, reply.text
    return reply.json()


async def save_for_sampler(client: Client, model_id: str, seq_id: int, name: str = "s", **fields: Any) -> str:
    body = {"model_id": model_id, "seq_id": seq_id, "path": name} | fields
    return (await client.result(await client.call("save_weights_for_sampler", body)))["path"]


async def events(client: Client, **query: Any) -> list[str]:
    return [entry["event"] for entry in (await get(client, "audit", **query))["entries"]]


async def expire(stack: Stack, path: str) -> None:
    await stack.gateway.store.checkpoints.update(path, expires_at=time.time() - 1)


async def is_deleted(stack: Stack, location: str) -> None:
    async with asyncio.timeout(10):
        while location in stack.trainer.checkpoints:
            stack.trainer.deletion.clear()
            await stack.trainer.deletion.wait()


async def test_a_deleted_checkpoint_is_gone_with_its_files(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    await ask(client, "DELETE", path)
    assert stack.trainer.checkpoints == {}
    assert (await get(client, f"training_runs/{run_id}/checkpoints"))["checkpoints"] == []
    assert path in (await client.call("weights_info", {"tinker_path": path}, status=404))["detail"]
    assert path in (await ask(client, "DELETE", path, status=404))["detail"]
    assert await events(client) == ["checkpoint_create", "checkpoint_delete"]
    assert (await save(client, run_id, 2))["path"] == path


@pytest.mark.gateway(reap_interval_s=0.2)
async def test_a_deletion_that_the_trainer_did_not_finish_is_finished_later(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    await stack.trainer_backend.stop()
    for _ in range(2):
        await ask(client, "DELETE", path)
    assert path.removeprefix("tinker://") in stack.trainer.checkpoints
    assert (await get(client, f"training_runs/{run_id}/checkpoints"))["checkpoints"] == []
    assert "there is no" in (await client.call("weights_info", {"tinker_path": path}, status=404))["detail"]
    await stack.trainer_backend.start()
    await is_deleted(stack, path.removeprefix("tinker://"))
    assert await events(client) == ["checkpoint_create", "checkpoint_delete"]


async def test_an_expired_checkpoint_vanishes_at_once_and_then_from_the_disk(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    await expire(stack, path)
    assert (await get(client, f"training_runs/{run_id}/checkpoints"))["checkpoints"] == []
    assert (await get(client, "checkpoints"))["cursor"]["total_count"] == 0
    assert (await get(client, f"training_runs/{run_id}"))["last_checkpoint"] is None
    load = {"model_id": run_id, "seq_id": 2, "path": path, "optimizer": False}
    failure = await client.result(await client.call("load_weights", load))
    assert failure["category"] == "user"
    await stack.gateway.reaper.delete_expired()
    assert stack.trainer.checkpoints == {}
    assert await events(client) == ["checkpoint_create", "checkpoint_expire"]


@pytest.mark.parametrize("how", ["delete", "expire", "prune"])
async def test_a_save_in_the_place_of_a_deleted_one_stays(stack: Stack, client: Client, how: str) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    location, gateway = path.removeprefix("tinker://"), stack.gateway
    stack.trainer.on_deletion = lambda: save(client, run_id, 2, overwrite=True)
    match how:
        case "delete":
            await ask(client, "DELETE", path)
        case "expire":
            await expire(stack, path)
            await gateway.reaper.delete_expired()
        case _:
            checkpoint = await gateway.store.checkpoints.get(path)
            assert checkpoint is not None
            assert await gateway.storage.checkpoints.prune(checkpoint, owner="local")
    assert stack.trainer.checkpoints[location].version_id == f"{run_id}@2"
    assert (await get(client, f"training_runs/{run_id}/checkpoints"))["checkpoints"][0]["tinker_path"] == path
    await gateway.reaper.delete_expired()
    assert location in stack.trainer.checkpoints


@pytest.mark.parametrize("how", ["delete", "expire"])
@pytest.mark.gateway(reap_interval_s=0.2)
async def test_a_sampler_goes_on_without_its_checkpoint(stack: Stack, client: Client, how: str) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    path = await save_for_sampler(client, run_id, 1)
    location = path.removeprefix("tinker://")
    version_id = stack.trainer.checkpoints[location].version_id
    sampler_id = await client.sampling_session(session_id, model_path=path)
    await (ask(client, "DELETE", path) if how == "delete" else expire(stack, path))
    await is_deleted(stack, location)
    (retired,) = stack.trainer.checkpoints
    await client.call("weights_info", {"tinker_path": path}, status=404)

    stack.sampler.versions = {""}  # evicted
    await client.result(await client.call("asample", sample_body(sampler_id, 0)))
    assert stack.trainer.published == [version_id]

    assert await save_for_sampler(client, run_id, 2) == path  # the name is free
    stack.sampler.versions = {""}
    await client.result(await client.call("asample", sample_body(sampler_id, 1)))
    assert stack.trainer.published == [version_id, version_id]

    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    await is_deleted(stack, retired)
    assert list(stack.trainer.checkpoints) == [location]
    await stack.gateway.storage.retired.delete_unused()
    assert await stack.gateway.storage.retired.find(location, version_id) is None


async def test_a_checkpoint_that_several_remove_at_once_is_kept_for_its_sampler(stack: Stack, client: Client) -> None:
    """A client's request and the reaper, say."""
    session_id = await client.session()
    path = await save_for_sampler(client, await client.model(session_id), 1)
    await client.sampling_session(session_id, model_path=path)
    gateway = stack.gateway
    checkpoint = await gateway.store.checkpoints.get(path)
    assert checkpoint is not None
    await asyncio.gather(*(gateway.storage.retired.keep_for_samplers(checkpoint) for _ in range(8)))
    found = await gateway.storage.retired.find(checkpoint.location, checkpoint.version_id)
    assert found in stack.trainer.checkpoints


async def test_a_copy_for_a_sampler_is_known_before_it_exists(stack: Stack, client: Client) -> None:
    """Otherwise a gateway that is killed after the copy, and before it notes it, leaves files that nobody deletes. The
    session may end before the copy exists."""
    session_id = await client.session()
    path = await save_for_sampler(client, await client.model(session_id), 1)
    await client.sampling_session(session_id, model_path=path)
    retired, checkpoint = stack.gateway.storage.retired, await stack.gateway.store.checkpoints.get(path)
    assert checkpoint is not None
    known = []

    async def copied() -> None:
        known.append(await retired.find(checkpoint.location, checkpoint.version_id))
        await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
        await retired.delete_unused()
        assert await retired.find(checkpoint.location, checkpoint.version_id) is None

    stack.trainer.on_copy = copied
    await retired.keep_for_samplers(checkpoint)
    assert known[0] is not None
    await retired.delete_unused()
    assert known[0] not in stack.trainer.checkpoints


async def test_a_sampler_goes_on_when_its_checkpoint_is_overwritten(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    path = (await save(client, run_id, 1))["path"]
    location = path.removeprefix("tinker://")
    version_id = stack.trainer.checkpoints[location].version_id
    sampler_id = await client.sampling_session(session_id, model_path=path)
    await save(client, run_id, 2, overwrite=True)
    await client.result(await client.call("asample", sample_body(sampler_id, 0)))
    assert stack.trainer.published == [version_id]
    assert stack.trainer.checkpoints[location].version_id != version_id


async def test_files_that_no_live_sampler_uses_are_not_kept(stack: Stack, client: Client) -> None:
    session_id, ended = await client.session(), await client.session()
    run_id = await client.model(session_id)
    path = await save_for_sampler(client, run_id, 1)
    await client.sampling_session(ended, model_path=path)
    await client.call(f"sessions/{ended}/finish", {"reason": {"type": "success"}})
    await ask(client, "DELETE", path)
    assert stack.trainer.checkpoints == {}


async def test_publishing_is_idempotent_and_can_be_undone(client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    for method, public in (("POST", True), ("POST", True), ("DELETE", False), ("DELETE", False)):
        assert await ask(client, method, path, "publish") == {}
        (listed,) = (await get(client, f"training_runs/{run_id}/checkpoints"))["checkpoints"]
        assert listed["public"] is public
    assert await events(client, event_type="checkpoints") == [
        "checkpoint_create",
        "checkpoint_publish",
        "checkpoint_unpublish",
    ]


async def test_a_ttl_counts_from_now_and_null_removes_it(client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1, ttl_seconds=3600))["path"]
    await ask(client, "PUT", path, "ttl", ttl_seconds=7200)
    (listed,) = (await get(client, "checkpoints"))["checkpoints"]
    assert 7190 < datetime.fromisoformat(listed["expires_at"]).timestamp() - time.time() <= 7200
    await ask(client, "PUT", path, "ttl", ttl_seconds=None)
    (listed,) = (await get(client, "checkpoints"))["checkpoints"]
    assert listed["expires_at"] is None


@pytest.mark.parametrize("body", [{"ttl_seconds": 3599}, {"ttl_seconds": 315360001}, {"ttl_seconds": "1"}, {"x": 1}])
async def test_a_ttl_out_of_range_is_refused(client: Client, body: dict[str, Any]) -> None:
    path = (await save(client, await client.model(await client.session()), 1))["path"]
    assert "ttl_seconds" in (await ask(client, "PUT", path, "ttl", status=400, **body))["detail"]


@pytest.mark.parametrize(("method", "action"), [("DELETE", ""), ("POST", "publish"), ("DELETE", "publish")])
@pytest.mark.parametrize(("kind", "status"), [("weights", 404), ("other", 400)])
async def test_checkpoints_that_are_not_there(client: Client, method: str, action: str, kind: str, status: int) -> None:
    detail = (await ask(client, method, f"tinker://s:train:0/{kind}/x", action, status=status))["detail"]
    assert f"s:train:0/{kind}/x" in detail


async def test_an_external_save_names_its_size_and_passes_on_its_recipients(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    body = {"model_id": run_id, "seq_id": 1, "path": "x", "age_encryption_recipients": ["age1abc"], "ttl_seconds": 3600}
    saved = await client.result(await client.call("save_weights_external", body))
    path = f"tinker://{run_id}/external_weights/x"
    assert saved == {"type": "save_weights_external", "path": path, "size_bytes": 100}
    info = stack.trainer.checkpoints[f"{run_id}/external_weights/x"]
    assert info.encrypted
    assert info.ttl.seconds == 3600
    load = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": False}
    assert "made for download" in (await client.result(await client.call("load_weights", load)))["error"]
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    assert "made for download" in (await client.call("create_sampling_session", sampler, status=400))["detail"]


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"path": "a/b"}, "path"),
        ({"ttl_seconds": 1}, "ttl_seconds"),
        ({"age_encryption_recipients": ["age1"] * 11}, "age_encryption_recipients"),
    ],
)
async def test_external_saves_that_are_refused(client: Client, fields: dict[str, Any], part: str) -> None:
    run_id = await client.model(await client.session())
    body = {"model_id": run_id, "seq_id": 1, "path": "x"} | fields
    failure = await client.result(await client.call("save_weights_external", body))
    assert failure["category"] == "user"
    assert part in failure["error"]


async def copy(client: Client, source: str, *, key: str = "k", status: int = 200, **fields: Any) -> Any:
    body = {"source_path": source} | fields
    reply = await client.post("/api/v1/copy_weights", json=body, headers={"x-idempotency-key": key})
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_a_copy_has_a_run_of_its_own_and_outlives_its_source(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    source = await save_for_sampler(client, run_id, 1, ttl_seconds=3600, user_metadata={"k": "v"})
    made = [await copy(client, source, destination_project_id="p", ttl_seconds=7200) for _ in range(2)]
    path = made[0]["tinker_path"]
    assert made == [{"tinker_path": path}] * 2
    assert path.endswith("/sampler_weights/s")
    copied_run = path.removeprefix("tinker://").split("/")[0]
    (listed,) = (await get(client, f"training_runs/{copied_run}/checkpoints"))["checkpoints"]
    assert listed["user_metadata"] == {"k": "v"}
    assert 7190 < datetime.fromisoformat(listed["expires_at"]).timestamp() - time.time() <= 7200
    (run,) = (await get(client, "training_runs", project_id="p"))["training_runs"]
    assert (run["training_run_id"], run["base_model"], run["lora_rank"]) == (copied_run, BASE_MODEL, 8)
    await ask(client, "DELETE", source)
    await client.call("weights_info", {"tinker_path": path})
    failure = await client.result((await client.forward_backward(copied_run, 1)).json())
    assert failure["category"] == "user"
    assert "it is a copy" in failure["error"]
    assert await copy(client, path, key="other", destination_project_id="p") != made[0]
    assert (await events(client)).count("checkpoint_copy") == 2
    detail = (await copy(client, path, destination_project_id="p", status=400))["detail"]
    assert "X-Idempotency-Key" in detail


async def test_a_copy_into_a_live_session_takes_the_run_that_it_names(client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    source = (await save(client, run_id, 1))["path"]
    for _ in range(2):
        made = await copy(client, source, session_id=session_id, model_seq_id=7)
        assert made == {"tinker_path": f"tinker://{session_id}:train:7/weights/one"}
    other = (await save(client, run_id, 2, "two"))["path"]
    assert "model_seq_id" in (await copy(client, source, session_id=session_id, model_seq_id=0, status=422))["detail"]
    await copy(client, other, session_id=session_id, model_seq_id=7)


@pytest.mark.parametrize(
    ("fields", "status", "part"),
    [
        ({}, 400, "exactly one"),
        ({"destination_project_id": "p", "session_id": "s", "model_seq_id": 1}, 400, "exactly one"),
        ({"session_id": "s"}, 400, "belong together"),
        ({"session_id": "s", "model_seq_id": 1}, 404, "'s'"),
        ({"destination_project_id": "p", "ttl_seconds": 5}, 400, "ttl_seconds"),
        ({"destination_project_id": "p", "weights_access_token": "t"}, 400, "weights_access_token"),
        ({"destination_project_id": "p"}, 404, "source_path"),
    ],
)
async def test_copies_that_are_refused(client: Client, fields: dict[str, Any], status: int, part: str) -> None:
    assert part in (await copy(client, "tinker://r:train:0/weights/x", status=status, **fields))["detail"]


async def test_an_access_token_is_refused_by_the_name_of_its_header(client: Client) -> None:
    body = {"source_path": "tinker://r:train:0/weights/x", "destination_project_id": "p"}
    headers = {"x-tinker-weights-access-token": "secret"}
    reply = await client.post("/api/v1/copy_weights", json=body, headers=headers)
    assert reply.status_code == 400
    assert "X-Tinker-Weights-Access-Token" in reply.text
    assert "secret" not in reply.text


async def test_a_checkpoint_and_a_model_name_their_optimizer(client: Client) -> None:
    run_id = await client.model(await client.session(), optimizer_config={"type": "dimuon"})
    path = (await save(client, run_id, 1))["path"]
    info = await client.call("weights_info", {"tinker_path": path})
    assert info["optimizer_config"] == {"type": "dimuon"}
    assert (await client.call("get_info", {"model_id": run_id}))["optimizer_config"] == {"type": "dimuon"}


async def test_a_duplicate_name_fails_the_future_at_once(client: Client) -> None:
    run_id = await client.model(await client.session())
    await save(client, run_id, 1)
    failure = await save(client, run_id, 2)
    assert failure["category"] == "user"
    assert "exists" in failure["error"]
