"""Runs move between trainers behind a gateway, and a trainer is drained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.waiting import until
from tests.unit.gateway.stack import BASE_MODEL, Backend, Client, FakeTrainer, Stack
from tests.unit.gateway.test_several_trainers import all_reached, run_on, trained, trainer_of
from tinsmith.errors import ModelNotFound, NotReady, OutOfCapacity, ServiceError

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_LOOK_S": 0.2, "_AGAIN_S": 0.1, "_LONGEST_PAUSE_S": 0.2}.items():
        monkeypatch.setattr(f"gateway.moving.{name}", value)


@pytest.fixture
async def other(stack: Stack) -> AsyncIterator[Backend]:
    """A second trainer with the same store, for checkpoints and packages."""
    trainer = FakeTrainer()
    trainer.checkpoints, trainer.samplers = stack.trainer.checkpoints, stack.trainer.samplers
    trainer.packages = stack.trainer.packages
    backend = Backend(trainer, "trainer")
    await backend.start()
    stack.trainer_ports = [stack.trainer_backend.port, backend.port]
    await stack.restart_gateway()
    await all_reached(stack)
    yield backend
    await backend.stop()


def address(backend: Backend) -> str:
    return f"127.0.0.1:{backend.port}"


async def drain(client: Client, backend: Backend, *, action: str = "drain", **options: bool) -> dict[str, Any]:
    reply = await client.post(f"/api/v1/trainers/{action}", json={"trainer": address(backend), **options})
    assert reply.status_code == 200, reply.text
    return next(one for one in reply.json()["trainers"] if one["address"] == address(backend))


async def state(client: Client, backend: Backend) -> dict[str, Any]:
    found = (await client.get("/api/v1/trainers")).json()["trainers"]
    return next(one for one in found if one["address"] == address(backend))


async def drained(client: Client, backend: Backend) -> dict[str, Any]:
    """Waits until the trainer can be stopped."""
    return await shown(client, backend, "can_be_stopped")


async def shown(client: Client, backend: Backend, field: str, *, is_set: bool = True) -> dict[str, Any]:
    """Waits until the field of the trainer's state is true, or not empty; or not so."""
    one: dict[str, Any] = {}
    for _ in range(600):
        if bool((one := await state(client, backend))[field]) == is_set:
            return one
        await asyncio.sleep(0.05)
    raise AssertionError(one)


async def test_a_drained_trainer_gives_its_runs_away_and_gets_no_new_ones(
    stack: Stack, client: Client, other: Backend
) -> None:
    runs = [await run_on(client, other, stack, seq=seq) for seq in range(3)]
    assert (await state(client, other))["num_runs"] == 3
    began = await drain(client, other)
    assert (began["is_drained"], began["state"]) == (True, "serving")
    done = await drained(client, other)
    assert (done["num_runs"], done["num_moving"], done["problems"]) == (0, 0, {})
    shown = (await client.get("/dashboard/api/services")).json()["trainers"]
    assert [(one["num_runs"], one["is_drained"], one["can_be_stopped"]) for one in shown] == [
        (3, False, False),
        (0, True, True),
    ]
    for model_id in runs:
        assert trained(stack.trainer, model_id)
        assert not trained(other.servicer, model_id)
        assert await trainer_of(stack, model_id) == stack.trainer.trainer_id
        assert await client.result((await client.forward_backward(model_id, 1)).json())
    assert not stack.trainer.packages
    assert not other.servicer.moved
    assert await stack.gateway.store.moves.all() == []
    stack.trainer.reserved_bytes = 900
    assert trained(stack.trainer, await client.model(await client.session(), seq=0))
    assert not (await drain(client, other, action="undrain"))["is_drained"]
    assert trained(other.servicer, await client.model(await client.session(), seq=0))


@pytest.mark.parametrize("until_restart", [True, False])
async def test_a_trainer_that_is_drained_until_it_restarts_takes_runs_again_by_itself(
    stack: Stack, client: Client, other: Backend, until_restart: bool
) -> None:
    model_id = await run_on(client, other, stack)
    await drain(client, other, until_restart=until_restart)
    await drained(client, other)
    await stack.restart_gateway()
    await all_reached(stack)
    assert (await state(client, other))["is_drained"], "the trainer's process is the same"
    before = (await state(client, other))["boot_id"]
    await other.stop()
    await other.start()
    await until(lambda: stack.gateway.moving.find(address(other)).info.boot_id != before)
    if until_restart:
        await shown(client, other, "is_drained", is_set=False)
        stack.trainer.reserved_bytes = 900
        assert trained(other.servicer, await client.model(await client.session(), seq=0))
    else:
        await stack.gateway.moving._round()
        assert (await state(client, other))["is_drained"]
    assert trained(stack.trainer, model_id)


async def test_operations_in_work_are_answered_by_the_new_trainer(stack: Stack, client: Client, other: Backend) -> None:
    model_id = await run_on(client, other, stack)
    stored = (await client.forward_backward(model_id, 1)).json()
    first = await client.result(stored)
    other.servicer.go.clear()  # what comes now waits
    waiting = [await client.call("optim_step", {"model_id": model_id, "seq_id": seq}) for seq in (2, 3)]
    await drain(client, other)
    await drained(client, other)
    for receipt in waiting:
        assert await client.result(receipt)
    assert await client.result(stored) == first
    assert await client.result((await client.forward_backward(model_id, 4)).json())


STEPS = ["ReleaseModel", "AdoptModel", "ForgetMove"]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("rpc", STEPS)
async def test_a_step_that_fails_is_made_again(
    stack: Stack, client: Client, other: Backend, rpc: str, side: str
) -> None:
    model_id = await run_on(client, other, stack)
    trainer = other.servicer if side == "source" else stack.trainer
    trainer.moving_fails = [(rpc, NotReady("the store is away")), (rpc, OutOfCapacity("the disk is full"))]
    await drain(client, other)
    await drained(client, other)
    assert await trainer_of(stack, model_id) == stack.trainer.trainer_id
    assert await client.result((await client.forward_backward(model_id, 1)).json())


@pytest.mark.parametrize("rpc", STEPS)
async def test_a_gateway_that_dies_in_a_move_finishes_it_after_its_restart(
    stack: Stack, client: Client, other: Backend, rpc: str
) -> None:
    model_id = await run_on(client, other, stack)
    fails: ServiceError = NotReady("it does not come back")
    for trainer in (other.servicer, stack.trainer):
        trainer.moving_fails = [(rpc, fails)] * 1000
    await drain(client, other)
    await until(lambda: rpc in [*other.servicer.move_calls, *stack.trainer.move_calls])
    await stack.restart_gateway()
    for trainer in (other.servicer, stack.trainer):
        trainer.moving_fails = []
    await all_reached(stack)
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as again:
        await drained(again, other)
        assert await again.result((await again.forward_backward(model_id, 1)).json())
    assert await trainer_of(stack, model_id) == stack.trainer.trainer_id
    assert not trained(other.servicer, model_id)


async def test_the_source_may_be_stopped_and_its_old_runs_go_on(stack: Stack, client: Client, other: Backend) -> None:
    model_id = await run_on(client, other, stack)
    receipt = (await client.forward_backward(model_id, 1)).json()
    await client.result(receipt)
    await drain(client, other)
    await drained(client, other)
    await other.stop()
    assert await client.result((await client.forward_backward(model_id, 2)).json())
    await stack.restart_gateway()
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as again:
        assert await again.result(receipt)
        assert await again.result((await again.forward_backward(model_id, 3)).json())


async def test_a_source_that_dies_after_its_release_is_not_needed(stack: Stack, client: Client, other: Backend) -> None:
    """An answer is waited for at the source, which does not come back."""
    model_id = await run_on(client, other, stack)
    other.servicer.go.clear()
    waiting = await client.call("optim_step", {"model_id": model_id, "seq_id": 1})
    stack.trainer.moving_fails = [("AdoptModel", NotReady("in a moment"))] * 1000
    await drain(client, other)
    await until(lambda: "AdoptModel" in stack.trainer.move_calls)
    await other.stop()
    stack.trainer.moving_fails = []
    other.servicer.go.set()
    assert await client.result(waiting)
    assert await trainer_of(stack, model_id) == stack.trainer.trainer_id


async def test_a_run_that_its_trainer_does_not_have_keeps_nobody_from_stopping_it(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    del other.servicer.models[model_id]
    await drain(client, other)
    done = await drained(client, other)
    assert done["problems"] == {model_id: f"gone: no model {model_id}"}
    assert await trainer_of(stack, model_id) == other.servicer.trainer_id


async def test_a_run_that_cannot_be_released_stays_and_the_reason_is_shown(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    other.servicer.moving_fails = [("ReleaseModel", OutOfCapacity("the disk is full"))] * 1000
    await drain(client, other)
    one = await shown(client, other, "problems")
    assert one["problems"] == {model_id: "the disk is full"}
    assert not one["can_be_stopped"]
    assert await client.result((await client.forward_backward(model_id, 1)).json())
    other.servicer.moving_fails = []
    await drained(client, other)


async def test_a_run_that_ends_while_it_moves_is_deleted_at_its_new_trainer(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    stack.trainer.moving_fails = [("AdoptModel", NotReady("in a moment"))] * 1000
    await drain(client, other)
    await until(lambda: "AdoptModel" in stack.trainer.move_calls)
    await client.call("unload_model", {"model_id": model_id})
    await asyncio.sleep(0.2)
    assert other.servicer.deleted_models == stack.trainer.deleted_models == []
    stack.trainer.moving_fails = []
    await drained(client, other)
    await stack.gateway.reaper.reap()
    await until(lambda: stack.trainer.deleted_models == [model_id])
    assert other.servicer.deleted_models == []


async def test_what_cannot_be_drained_is_refused(stack: Stack, client: Client, other: Backend) -> None:
    refused = await client.post("/api/v1/trainers/drain", json={"trainer": "nowhere:1"})
    assert refused.status_code == 400
    assert "trainer: 'nowhere:1' is no address or id of a trainer; this server has 127.0.0.1:" in refused.text
    await drain(client, other)
    last = await client.post("/api/v1/trainers/drain", json={"trainer": address(stack.trainer_backend)})
    assert f"is the only one that takes runs of '{BASE_MODEL}', so nothing can move" in last.text
    assert "trainer: Field required" in (await client.post("/api/v1/trainers/drain", json={})).text


async def test_a_release_that_finds_nothing_asks_the_target(stack: Stack, client: Client, other: Backend) -> None:
    """With a journal in one database the source forgets a run as soon as the target has it."""
    model_id = await run_on(client, other, stack)
    other.servicer.moving_fails = [("ReleaseModel", ModelNotFound("no such model"))]
    stack.trainer.models[model_id] = other.servicer.models.pop(model_id)
    await drain(client, other)
    await drained(client, other)
    assert await trainer_of(stack, model_id) == stack.trainer.trainer_id


async def test_only_an_admin_sees_and_drains_trainers(stack: Stack) -> None:
    await stack.restart_gateway(
        api_keys=[{"key": "tml-test", "owner": "one"}, {"key": "tml-root", "owner": "root", "admin": True}]
    )
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as client:
        root = {"x-api-key": "tml-root"}
        for method, path in (("GET", ""), ("POST", "/drain"), ("POST", "/undrain")):
            body = {"trainer": "x"} if path else None
            reply = await client.request(method, f"/api/v1/trainers{path}", json=body)
            assert (reply.status_code, "is not that of an admin" in reply.text) == (403, True)
            reply = await client.request(method, f"/api/v1/trainers{path}", json=body, headers=root)
            assert reply.status_code == (400 if path else 200)
