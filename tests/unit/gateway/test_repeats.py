"""A repeat has the answer of the first request, also when what that needed is gone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, sample_body
from tests.unit.gateway.test_checkpoints import ask, copy, save_for_sampler
from tests.unit.gateway.test_runs import get
from tests.unit.gateway.test_weights import save


async def test_a_sampling_session_is_the_same_without_its_checkpoint(client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    path = await save_for_sampler(client, run_id, 1)
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    made = await client.call("create_sampling_session", body)
    await ask(client, "DELETE", path)
    assert await client.call("create_sampling_session", body) == made
    assert await client.call("create_sampling_session", body | {"base_model": BASE_MODEL}) == made
    for change in ({"model_path": f"{path}2"}, {"base_model": "other"}, {"model_path": None, "base_model": BASE_MODEL}):
        detail = (await client.call("create_sampling_session", body | change, status=422))["detail"]
        assert f"sampling_session_seq_id: {session_id}:sample:0 samples from {path}" in detail
    sampled = await client.result(await client.call("asample", sample_body(made["sampling_session_id"], 0)))
    assert isinstance(sampled, bytes)  # and no failure


async def test_an_ephemeral_save_is_not_taken_for_the_base_model(client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    save_body = {"model_id": run_id, "seq_id": 1, "sampling_session_seq_id": 4}
    await client.result(await client.call("save_weights_for_sampler", save_body))
    body = {"session_id": session_id, "sampling_session_seq_id": 4, "base_model": BASE_MODEL}
    assert f"{run_id}/ephemeral" in (await client.call("create_sampling_session", body, status=422))["detail"]


@pytest.mark.parametrize("form", ["project", "session"])
@pytest.mark.parametrize("ttl", [{}, {"ttl_seconds": 7200}])
async def test_a_copy_is_the_same_without_its_source_but_not_with_another_ttl(
    client: Client, form: str, ttl: dict[str, Any]
) -> None:
    session_id = await client.session()
    source = (await save(client, await client.model(session_id), 1))["path"]
    into: dict[str, Any] = {"destination_project_id": "p"}
    if form == "session":
        into = {"session_id": session_id, "model_seq_id": 5}
    made = await copy(client, source, **into, **ttl)
    await ask(client, "DELETE", source)
    assert await copy(client, source, **into, **ttl) == made
    detail = (await copy(client, source, **into, ttl_seconds=3600, status=422))["detail"]
    assert detail.startswith(f"ttl_seconds: {made['tinker_path']} was made with another value than 3600")
    other = source.replace(":train:0", ":train:1")
    status, part = (400, "X-Idempotency-Key") if form == "project" else (422, "is taken by another checkpoint")
    assert part in (await copy(client, other, **into, **ttl, status=status))["detail"]


async def test_a_copy_that_the_database_forgot_keeps_its_ttl(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    source = (await save(client, await client.model(session_id), 1))["path"]
    into: dict[str, Any] = {"session_id": session_id, "model_seq_id": 5}
    made = await copy(client, source, **into, ttl_seconds=3600)
    await stack.gateway.store.operations.delete(made["tinker_path"])
    assert "ttl_seconds" in (await copy(client, source, **into, status=422))["detail"]
    assert await copy(client, source, **into, ttl_seconds=3600) == made


async def test_a_deleted_copy_can_be_made_again(client: Client) -> None:
    session_id = await client.session()
    source = (await save(client, await client.model(session_id), 1))["path"]
    into: dict[str, Any] = {"session_id": session_id, "model_seq_id": 5}
    made = await copy(client, source, **into)
    await ask(client, "DELETE", made["tinker_path"])
    assert await copy(client, source, **into, ttl_seconds=3600) == made
    await client.call("weights_info", {"tinker_path": made["tinker_path"]})


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_model_that_was_loaded_is_the_same_without_its_checkpoint(
    stack: Stack, client: Client, restarts: bool
) -> None:
    session_id = await client.session()
    path = (await save(client, await client.model(session_id), 1))["path"]
    body = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": False}
    made = await client.call("load_weights", body)
    answer = await client.result(made)
    await ask(client, "DELETE", path)
    if restarts:
        await stack.restart_gateway()
    assert await client.call("load_weights", body) == made
    assert await client.result(made) == answer
    assert stack.trainer.orders[made["model_id"]] == [0]
    assert (
        "was used by another" in (await client.call("load_weights", body | {"optimizer": True}, status=422))["detail"]
    )


@pytest.mark.gateway(submit_timeout_s=0.5)
async def test_a_load_that_the_trainer_never_had_is_not_taken_for_done(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    path = (await save(client, await client.model(session_id), 1))["path"]
    body = {"session_id": session_id, "model_seq_id": 1, "path": path, "optimizer": False}
    stack.trainer.is_loading = True
    await client.call("load_weights", body, status=503)
    stack.trainer.is_loading = False
    made = await client.call("load_weights", body)
    assert (await client.result(made))["model_id"] in stack.trainer.models


async def test_a_load_that_failed_stays_failed(client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    body = {"session_id": session_id, "model_seq_id": 1, "path": f"tinker://{run_id}/weights/one"}
    made = await client.call("load_weights", body)
    await save(client, run_id, 1)
    assert await client.call("load_weights", body) == made
    assert "there is no checkpoint" in (await client.result(made))["error"]


async def test_a_deletion_can_be_repeated_with_its_key(client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    url = f"/api/v1/training_runs/{run_id}/checkpoints/weights/one"

    async def delete(key: str | None) -> int:
        return (await client.delete(url, headers={} if key is None else {"x-idempotency-key": key})).status_code

    assert [await delete(key) for key in ("a", "a", "b", None)] == [200, 200, 404, 404]
    assert (await save(client, run_id, 2))["path"] == path
    assert await delete("a") == 200
    assert len((await get(client, f"training_runs/{run_id}/checkpoints"))["checkpoints"]) == 1


async def test_deletions_are_remembered_for_a_day(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await client.model(await client.session())
    await save(client, run_id, 1)
    url = f"/api/v1/training_runs/{run_id}/checkpoints/weights/one"
    for retention_s, status in ((86400.0, 200), (0.0, 404)):
        monkeypatch.setattr("gateway.storage.checkpoints._DELETION_RETENTION_S", retention_s)
        await client.delete(url, headers={"x-idempotency-key": "a"})
        await stack.gateway.storage.checkpoints.forget_deletions()
        assert (await client.delete(url, headers={"x-idempotency-key": "a"})).status_code == status


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [("create_model", {"base_model": BASE_MODEL, "lora_config": {"rank": 8}}), ("load_weights", {"optimizer": False})],
)
async def test_a_run_of_copies_cannot_become_a_model(
    stack: Stack, client: Client, endpoint: str, fields: dict[str, Any]
) -> None:
    session_id = await client.session()
    source = (await save(client, await client.model(session_id), 1))["path"]
    ids: dict[str, Any] = {"session_id": session_id, "model_seq_id": 5}
    await copy(client, source, **ids)
    path = {"path": source} if endpoint == "load_weights" else {}
    receipt = await client.call(endpoint, ids | path | fields)
    for _ in range(2):
        failure = await client.result(receipt)
        assert failure["category"] == "user"
        assert failure["error"].startswith("model_seq_id: 5 is taken")
        await stack.restart_gateway()
    assert list(stack.trainer.models) == [f"{session_id}:train:0"]


async def test_an_ephemeral_save_that_is_sent_again_may_name_another_sampling_session(
    stack: Stack, client: Client
) -> None:
    """The SDK takes a new number each time it sends the save, and goes on with the session that the answer names."""
    session_id = await client.session()
    save = {"model_id": await client.model(session_id), "seq_id": 1, "sampling_session_seq_id": 0}
    receipt = await client.call("save_weights_for_sampler", save)
    assert await client.call("save_weights_for_sampler", save | {"sampling_session_seq_id": 1}) == receipt
    first = await client.result(receipt)
    await stack.restart_gateway()
    again = await client.call("save_weights_for_sampler", save | {"sampling_session_seq_id": 2})
    second = await client.result(again)  # of a gateway that knows nothing of the first; the weights are the same
    for answer in (first, second):
        receipt = await client.call("asample", sample_body(answer["sampling_session_id"], 1))
        assert "error" not in str(await client.result(receipt))[:200]
    one, two = stack.sampler.requests[-2:]
    assert one.version_id == two.version_id != ""
    other = {"model_id": save["model_id"], "seq_id": 1, "path": "named"}
    await client.call("save_weights_for_sampler", other, status=422)
