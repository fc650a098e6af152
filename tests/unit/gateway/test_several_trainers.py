"""Several trainers of one base model behind a gateway: a run is placed by load, and stays with its trainer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.support.waiting import until
from tests.unit.gateway.stack import BASE_MODEL, Backend, Client, FakeTrainer, Stack


@pytest.fixture
async def other(stack: Stack) -> AsyncIterator[Backend]:
    """A second trainer with the same checkpoint store, which the gateway knows from its start."""
    trainer = FakeTrainer()
    trainer.checkpoints, trainer.samplers = stack.trainer.checkpoints, stack.trainer.samplers
    backend = Backend(trainer, "trainer")
    await backend.start()
    stack.trainer_ports = [stack.trainer_backend.port, backend.port]
    await stack.restart_gateway()
    await all_reached(stack)
    yield backend
    await backend.stop()


async def all_reached(stack: Stack) -> None:
    await stack.gateway.clients.settle(stack.gateway.clients.of_each_store)


def trained(trainer: FakeTrainer, model_id: str) -> bool:
    return model_id in trainer.models


async def run_on(client: Client, other: Backend, stack: Stack, *, seq: int = 0) -> str:
    """A new run at the other trainer."""
    stack.trainer.reserved_bytes = 900
    model_id = await client.model(await client.session(), seq=seq)
    stack.trainer.reserved_bytes = 0
    assert trained(other.servicer, model_id)
    assert not trained(stack.trainer, model_id)
    return model_id


async def trainer_of(stack: Stack, model_id: str) -> str | None:
    row = await stack.gateway.store.models.get(model_id)
    assert row is not None
    return row.trainer_id


# Placement


async def test_runs_spread_over_trainers_that_are_alike(stack: Stack, client: Client, other: Backend) -> None:
    session_id = await client.session()
    for seq in range(6):
        await client.model(session_id, seq=seq)
    assert len(stack.trainer.models) == len(other.servicer.models) == 3


@pytest.mark.parametrize("field", ["reserved_bytes", "queued_s"])
async def test_a_run_goes_where_there_is_more_room_or_less_work(
    stack: Stack, client: Client, other: Backend, field: str
) -> None:
    session_id = await client.session()
    setattr(stack.trainer, field, 500)
    one = await client.model(session_id, seq=0)
    setattr(other.servicer, field, 900)
    two = await client.model(session_id, seq=1)
    assert trained(other.servicer, one)
    assert trained(stack.trainer, two)
    assert await trainer_of(stack, one) == other.servicer.trainer_id


async def test_a_run_goes_to_a_trainer_that_answers(stack: Stack, client: Client, other: Backend) -> None:
    stack.trainer.reserved_bytes = 999
    await other.stop()
    assert trained(stack.trainer, await client.model(await client.session()))


async def test_a_gateway_that_starts_beside_a_dead_trainer_serves_the_others_after_a_while(
    stack: Stack, other: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await other.stop()
    await stack.restart_gateway()
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as client:
        reached = stack.gateway.clients
        await until(lambda: len(reached.unreached) == 1)
        waiting = await client.get("/api/v1/healthz")
        assert (waiting.status_code, waiting.json()["waiting_for"]) == (503, [f"127.0.0.1:{other.port}"])
        monkeypatch.setattr("gateway.clients.PATIENCE_S", 0.0)
        assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}
        assert (await client.get("/api/v1/get_server_capabilities")).json()["supported_models"]
        assert trained(stack.trainer, await client.model(await client.session()))
        assert reached.unreached, "the dashboard still names it"


# A run and its trainer


async def test_calls_of_a_run_go_to_its_trainer_after_a_restart_of_the_gateway(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    other.servicer.go.clear()
    receipt = (await client.forward_backward(model_id, 1)).json()
    assert stack.trainer_ports is not None
    stack.trainer_ports.reverse()
    await stack.restart_gateway()
    other.servicer.go.set()
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as again:
        assert await again.result(receipt)
        saved = await again.call("save_weights", {"model_id": model_id, "seq_id": 2, "path": "one"})
        assert (await again.result(saved))["path"] == f"tinker://{model_id}/weights/one"
        await again.call("unload_model", {"model_id": model_id})
        await until(lambda: other.servicer.deleted_models == [model_id])
    assert stack.trainer.deleted_models == []


@pytest.mark.gateway(submit_timeout_s=0.5)
async def test_calls_of_a_run_wait_for_its_trainer_and_never_go_to_another(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    await other.stop()
    assert (await client.forward_backward(model_id, 1)).status_code == 503
    assert trained(stack.trainer, await client.model(await client.session()))
    await stack.restart_gateway()  # which has not reached the trainer of the run yet
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as again:
        assert (await again.forward_backward(model_id, 1)).status_code == 503
        await other.start()
        await all_reached(stack)
        assert await again.result((await again.forward_backward(model_id, 1)).json())
    assert not trained(stack.trainer, model_id)


async def test_a_run_follows_its_trainer_to_another_address(
    stack: Stack, client: Client, other: Backend, tmp_path: Path
) -> None:
    model_id = await run_on(client, other, stack)
    moved = Backend(other.servicer, "trainer")
    await moved.start()
    await other.stop()
    file = tmp_path / "services.json"
    addresses = [f"127.0.0.1:{port}" for port in (stack.trainer_backend.port, moved.port)]
    file.write_text(json.dumps({"trainers": addresses, "samplers": [f"127.0.0.1:{stack.sampler_backend.port}"]}))
    await stack.restart_gateway(services_file=file)
    await all_reached(stack)
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as again:
        assert await again.result((await again.forward_backward(model_id, 1)).json())
    await moved.stop()


async def test_a_run_whose_row_names_no_trainer_is_found_where_it_is(
    stack: Stack, client: Client, other: Backend
) -> None:
    """Rows of earlier versions."""
    model_id = await run_on(client, other, stack)
    async with stack.gateway.store.begin() as db:
        await db.execute(text("UPDATE models SET trainer_id = NULL"))
    await stack.restart_gateway()
    await all_reached(stack)
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as again:
        assert await again.result((await again.forward_backward(model_id, 1)).json())
    assert await trainer_of(stack, model_id) == other.servicer.trainer_id


async def test_a_run_of_a_trainer_that_left_the_list_is_not_sought_at_another(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    stack.trainer_ports = None
    await stack.restart_gateway()
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as again:
        failed = await again.result((await again.forward_backward(model_id, 1)).json())
        assert f"is at trainer {other.servicer.trainer_id}, which is none of this gateway's trainers" in failed["error"]
        await again.call("unload_model", {"model_id": model_id})
        await until(lambda: stack.trainer.deleted_models == [model_id])  # for what it left in the store


# Checkpoints


async def test_a_checkpoint_is_loaded_by_a_run_at_another_trainer(stack: Stack, client: Client, other: Backend) -> None:
    source = await run_on(client, other, stack)
    saved = await client.result(await client.call("save_weights", {"model_id": source, "seq_id": 1, "path": "one"}))
    other.servicer.reserved_bytes = 900
    loading = await client.model(await client.session())
    assert trained(stack.trainer, loading)
    body = {"model_id": loading, "seq_id": 1, "path": saved["path"], "optimizer": True}
    assert (await client.result(await client.call("load_weights", body)))["path"] == saved["path"]


async def test_checkpoints_of_a_run_can_be_read_and_deleted_while_its_trainer_is_away(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    saved = await client.result(await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"}))
    await other.stop()
    await until(lambda: not stack.gateway.clients.trainers[1].is_connected)
    verified = await client.get(f"/api/v1/training_runs/{model_id}/checkpoints/weights/one/verify")
    assert verified.json()["intact"], verified.text
    reply = await client.delete(f"/api/v1/training_runs/{model_id}/checkpoints/weights/one")
    assert reply.status_code < 300, reply.text
    assert saved["path"].removeprefix("tinker://") not in stack.trainer.checkpoints


# Trainers that do not agree


async def refused(client: Client) -> str:
    body = {"session_id": await client.session(), "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {}}
    return (await client.result(await client.call("create_model", body)))["error"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("store_id", "6" * 32, f"the ids of their stores are {'5' * 32} and {'6' * 32}"),
        ("fingerprint", {"base_weights": "cd"}, "base_weights is 'ab' at the first and 'cd' at the second"),
        ("fingerprint", {}, "base_weights is 'ab' at the first and None at the second"),
        ("trainer_id", "", "one is older"),
    ],
)
async def test_trainers_that_do_not_agree_get_no_new_run_and_both_values_are_named(
    stack: Stack, client: Client, other: Backend, caplog: pytest.LogCaptureFixture, field: str, value: Any, said: str
) -> None:
    model_id = await client.model(await client.session())
    setattr(other.servicer, field, value)
    await other.stop()
    await other.start()
    await until(lambda: said in caplog.text)
    caplog.clear()
    error = await refused(client)
    assert said in error
    assert f"127.0.0.1:{stack.trainer_backend.port} and 127.0.0.1:{other.port}" in error
    if trained(stack.trainer, model_id):  # a run that was there goes on
        assert await client.result((await client.forward_backward(model_id, 1)).json())
