from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from tests.unit.gateway.stack import BASE_MODEL, Client, Stack
from tinsmith.rpc.times import timestamp
from tinsmith.v1 import types_pb2


async def save(client: Client, model_id: str, seq_id: int, name: str = "one", **fields: Any) -> Any:
    body = {"model_id": model_id, "seq_id": seq_id, "path": name} | fields
    return await client.result(await client.call("save_weights", body))


async def test_a_saved_state_is_found_and_loaded(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    saved = await save(client, model_id, 1, user_metadata={"k": "v"})
    assert saved == {"type": "save_weights", "path": f"tinker://{model_id}/weights/one"}
    info = await client.call("weights_info", {"tinker_path": saved["path"]})
    assert (info["base_model"], info["is_lora"], info["lora_rank"]) == (BASE_MODEL, True, 8)

    loaded = await client.call(
        "load_weights", {"model_id": model_id, "seq_id": 2, "path": saved["path"], "optimizer": True}
    )
    assert await client.result(loaded) == {"type": "load_weights", "path": saved["path"], "model_id": model_id}

    body = {"session_id": session_id, "model_seq_id": 1, "path": saved["path"], "optimizer": False}
    created = await client.call("load_weights", body)
    assert created == {"request_id": f"{session_id}:train:1:0", "model_id": f"{session_id}:train:1"}
    assert (await client.result(created))["model_id"] == f"{session_id}:train:1"
    info = await client.call("get_info", {"model_id": f"{session_id}:train:1"})
    assert (info["lora_rank"], info["model_name"]) == (8, BASE_MODEL)


async def test_a_model_of_rank_0_and_its_checkpoints_are_no_lora(client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id, lora_config={"rank": 0})
    path = (await save(client, model_id, 1))["path"]
    views = [
        await client.call("get_info", {"model_id": model_id}),
        await client.call("weights_info", {"tinker_path": path}),
        (await client.get(f"/api/v1/training_runs/{model_id}")).json(),
    ]
    assert [(view["is_lora"], view["lora_rank"]) for view in views] == [(False, None)] * 3


@pytest.mark.parametrize(
    "path",
    [
        "tinker://RUN/weights/missing",
        "tinker://RUN/weights/..",
        "tinker://../weights/one",
        "tinker://RUN/other/one",
        "/etc/passwd",
        "",
    ],
)
async def test_paths_that_lead_nowhere(client: Client, path: str) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    path = path.replace("RUN", model_id)
    status = 404 if path.endswith("missing") else 400
    named = repr("..") if ".." in path else path
    assert named in (await client.call("weights_info", {"tinker_path": path}, status=status))["detail"]
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    assert named in (await client.call("create_sampling_session", sampler, status=status))["detail"]
    for ids in ({"model_id": model_id, "seq_id": 1}, {"session_id": session_id, "model_seq_id": 1}):
        failure = await client.result(await client.call("load_weights", ids | {"path": path, "optimizer": False}))
        assert failure["category"] == "user"
        assert named in failure["error"]
    await save(client, model_id, 2)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"path": ".."}, "'..'"),
        ({"path": "a/b"}, "'a/b'"),
        ({"path": 3}, "path"),
        ({"ttl_seconds": 3599}, "3599"),
        ({"ttl_seconds": 10 * 365 * 86400 + 1}, "ttl_seconds"),
        ({"overwrite": "yes"}, "'yes'"),
    ],
)
async def test_saves_that_are_refused_fail_and_the_next_one_works(
    client: Client, fields: dict[str, Any], part: str
) -> None:
    model_id = await client.model(await client.session())
    failure = await save(client, model_id, 1, **fields)
    assert failure["category"] == "user"
    assert part in failure["error"]
    assert (await save(client, model_id, 2, "good"))["path"].endswith("/good")


async def test_an_ephemeral_save_makes_a_sampling_session(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    body = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 4, "kind": "snapshot"}
    saved = await client.result(await client.call("save_weights_for_sampler", body))
    sampler_id = f"{session_id}:sample:4"
    assert saved == {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler_id}
    sampler = (await client.get(f"/api/v1/samplers/{sampler_id}")).json()
    assert sampler == {"sampler_id": sampler_id, "base_model": BASE_MODEL, "model_path": None}
    again = await client.result(await client.call("save_weights_for_sampler", body | {"seq_id": 2}))
    assert "is taken by another request" in again["error"]
    both = await client.result(await client.call("save_weights_for_sampler", body | {"seq_id": 3, "path": "x"}))
    assert "exactly one" in both["error"]


async def test_saves_that_end_after_a_gateway_restart_are_indexed(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    stack.trainer.go.clear()
    named = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "late"})
    body = {"model_id": model_id, "seq_id": 2, "sampling_session_seq_id": 0}
    ephemeral = await client.call("save_weights_for_sampler", body)
    await stack.restart_gateway()
    stack.trainer.go.set()
    path = (await client.result(named))["path"]
    assert (await client.result(ephemeral))["sampling_session_id"] == f"{session_id}:sample:0"
    assert (await client.call("weights_info", {"tinker_path": path}))["lora_rank"] == 8
    assert (await client.get(f"/api/v1/samplers/{session_id}:sample:0")).status_code == 200


async def test_checkpoints_that_the_database_has_lost_are_found_again(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    path = (await save(client, model_id, 1))["path"]
    await stack.stop_gateway()
    for file in stack.state_dir.iterdir():
        file.unlink()
    await stack.start_gateway()
    assert (await client.call("weights_info", {"tinker_path": path}))["base_model"] == BASE_MODEL


async def test_a_checkpoint_that_a_client_of_the_trainer_replaces_or_deletes_is_seen(
    stack: Stack, client: Client
) -> None:
    model_id = await client.model(await client.session())
    path = (await save(client, model_id, 1))["path"]
    info = types_pb2.CheckpointInfo()
    info.CopyFrom(stack.trainer.checkpoints[path.removeprefix("tinker://")])
    info.location = info.location.replace(model_id, "of-a-grpc-client:train:0")
    for info.version_id, info.lora_config.rank in (("first", 4), ("second", 16)):
        stack.trainer.checkpoints[info.location] = info
        for _ in range(2):
            described = await client.call("weights_info", {"tinker_path": f"tinker://{info.location}"})
            assert described["lora_rank"] == info.lora_config.rank
    del stack.trainer.checkpoints[info.location]
    await client.call("weights_info", {"tinker_path": f"tinker://{info.location}"}, status=404)


@pytest.mark.gateway(reap_interval_s=0.2)
async def test_an_expired_checkpoint_is_not_found_and_then_deleted(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    path = (await save(client, model_id, 1, ttl_seconds=3600))["path"]
    location = path.removeprefix("tinker://")
    assert stack.trainer.checkpoints[location].ttl.seconds == 3600
    await client.call("weights_info", {"tinker_path": path})

    old = types_pb2.CheckpointInfo()
    old.CopyFrom(stack.trainer.checkpoints[location])
    old.location = location.replace("/one", "/old")
    old.created_at.CopyFrom(timestamp(time.time() - 4000))
    stack.trainer.checkpoints[old.location] = old
    old_path = path.replace("/one", "/old")
    assert "expired" in (await client.call("weights_info", {"tinker_path": old_path}, status=404))["detail"]
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": old_path}
    await client.call("create_sampling_session", sampler, status=404)
    async with asyncio.timeout(10):
        await stack.trainer.deletion.wait()
    assert old.location not in stack.trainer.checkpoints
    assert location in stack.trainer.checkpoints


async def test_a_load_may_be_sent_before_the_save_of_the_same_run_is_through(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    path = f"tinker://{model_id}/weights/one"
    stack.trainer.go.clear()
    saving = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"})
    body = {"model_id": model_id, "seq_id": 2, "path": path, "optimizer": True}
    loading = await client.call("load_weights", body)
    missing = await client.call("load_weights", {"model_id": model_id, "seq_id": 3, "path": f"{path}2"})
    stack.trainer.go.set()
    assert (await client.result(saving))["path"] == path
    assert await client.result(loading) == {"type": "load_weights", "path": path, "model_id": model_id}
    assert f"there is no checkpoint {path}2" in (await client.result(missing))["error"]
    assert await client.call("load_weights", body) == loading
    assert stack.trainer.orders[model_id] == [0, 1, 2, 3]


@pytest.mark.gateway(submit_timeout_s=0.5)
async def test_a_load_elsewhere_waits_for_the_save(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id, other = await client.model(session_id), await client.model(session_id, seq=1)
    path = f"tinker://{model_id}/weights/one"
    stack.trainer.go.clear()
    saving = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"})
    bodies = [
        {"model_id": other, "seq_id": 1, "path": path, "optimizer": True},
        {"session_id": session_id, "model_seq_id": 2, "path": path, "optimizer": False},
    ]
    late = [await client.call("load_weights", body, status=503) for body in bodies]  # after submit_timeout_s
    assert [f"path: {path} is still being saved" in answer["detail"] for answer in late] == [True, True]
    calls = [asyncio.create_task(client.call("load_weights", body)) for body in bodies]
    await asyncio.sleep(0.1)
    stack.trainer.go.set()
    loaded, created = [await client.result(receipt) for receipt in await asyncio.gather(*calls)]
    assert (loaded["path"], created["path"], created["model_id"]) == (path, path, f"{session_id}:train:2")
    assert (await client.result(saving))["path"] == path


async def test_a_load_elsewhere_does_not_wait_for_a_save_that_may_replace_what_is_there(
    stack: Stack, client: Client
) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    path = (await save(client, model_id, 1))["path"]
    stuck = {"model_id": model_id, "seq_id": 3, "path": "one", "overwrite": True}  # 2 never comes
    await client.call("save_weights", stuck)
    body = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": False}
    assert (await client.result(await client.call("load_weights", body)))["path"] == path


async def test_a_load_elsewhere_is_refused_with_the_reason_of_the_save_that_failed(
    stack: Stack, client: Client
) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    stack.trainer.go.clear()
    saving = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "full"})
    body = {"session_id": session_id, "model_seq_id": 1, "path": f"tinker://{model_id}/weights/full"}
    call = asyncio.create_task(client.call("load_weights", body | {"optimizer": False}))
    await asyncio.sleep(0.1)
    stack.trainer.go.set()
    error = (await client.result(await call))["error"]
    assert error == f"path: there is no checkpoint {body['path']}; its save has failed: no space left"
    assert (await client.result(saving))["error"] == "no space left"


async def test_a_checkpoint_is_loaded_into_a_new_model(client: Client) -> None:
    session_id = await client.session()
    path = (await save(client, await client.model(session_id), 1))["path"]
    body = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": False}
    assert "error" not in await client.result(await client.call("load_weights", body))


@pytest.mark.gateway(api_keys=[{"key": f"tml-{name}", "owner": name} for name in ("ann", "ben")])
async def test_a_load_waits_for_no_save_of_another_owner(stack: Stack, client: Client) -> None:
    ann = Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-ann"})
    ben = Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-ben"})
    async with ann, ben:
        model_id = await ann.model(await ann.session())
        stack.trainer.go.clear()
        saving = await ann.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"})
        body = {"model_seq_id": 0, "path": f"tinker://{model_id}/weights/one", "optimizer": False}
        refused = await ben.call("load_weights", body | {"session_id": await ben.session()})
        assert "there is no checkpoint" in (await ben.result(refused))["error"]
        stack.trainer.go.set()
        await ann.result(saving)


async def test_a_load_of_a_save_that_failed_finds_nothing(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    await save(client, model_id, 1)
    failed = await save(client, model_id, 2)  # the name is taken
    assert "exists" in failed["error"]
    await client.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/one")
    body = {"model_id": model_id, "seq_id": 3, "path": f"tinker://{model_id}/weights/one"}
    assert "there is no checkpoint" in (await client.result(await client.call("load_weights", body)))["error"]


async def test_a_submission_that_the_database_cannot_take_is_a_503_and_can_be_sent_again(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model_id = await client.model(await client.session())

    async def full(self: object, operation: object) -> bool:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    with monkeypatch.context() as patch:
        patch.setattr("gateway.database.operations.OperationRows.add", full)
        body = {"model_id": model_id, "seq_id": 1, "path": "a"}
        answer = await client.call("save_weights", body, status=503)
        assert "database" in answer["detail"]
        assert "disk is full" in caplog.text
        caplog.clear()
    receipt = await client.call("save_weights", body)
    assert (await client.result(receipt))["path"].endswith("/weights/a")
