"""A trainer does not come back: other trainers adopt its runs, if they share its database."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.waiting import until
from tests.unit.gateway.stack import Backend, Client, Stack
from tests.unit.gateway.test_moving import other, quick
from tests.unit.gateway.test_several_trainers import all_reached, run_on, trained, trainer_of
from tinsmith.errors import NotReady

__all__ = ["other", "quick"]


@pytest.fixture(autouse=True)
async def adopting(quick: None, stack: Stack, other: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second trainer may be adopted from soon after it has gone, and the first one shares its database."""
    monkeypatch.setattr("gateway.placement._LOOK_S", 0.1)
    stack.trainer.lost[other.servicer.trainer_id] = other.servicer
    await stack.restart_gateway(adopt_after_s=0.3)
    await all_reached(stack)


async def fenced(stack: Stack, *, times: int = 1) -> None:
    """Returns once the first trainer was asked to fence the second one."""
    await until(lambda: stack.trainer.move_calls.count("FenceTrainer") >= times)


async def test_runs_of_a_lost_trainer_go_on_at_another_one(stack: Stack, client: Client, other: Backend) -> None:
    model_id = await run_on(client, other, stack)
    idle = await run_on(client, other, stack, seq=1)
    answered = (await client.forward_backward(model_id, 1)).json()
    first = await client.result(answered)
    other.servicer.go.clear()
    waiting = [await client.call("optim_step", {"model_id": model_id, "seq_id": seq}) for seq in (2, 3)]
    await other.stop()
    new = await client.call("optim_step", {"model_id": model_id, "seq_id": 4})
    for model in stack.trainer.lost.values():
        model.go.set()
    for receipt in (*waiting, new):
        assert await client.result(receipt)
    assert await client.result(answered) == first
    await until(lambda: trained(stack.trainer, idle))
    for one in (model_id, idle):
        assert await trainer_of(stack, one) == stack.trainer.trainer_id
    await asyncio.sleep(0.5)
    assert await stack.gateway.store.moves.all() == []
    assert "ReleaseModel" not in other.servicer.move_calls


async def test_a_gateway_that_was_started_while_the_trainer_was_away_has_its_runs_adopted(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    await other.stop()
    await stack.restart_gateway(adopt_after_s=0.3)
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as again:
        assert await again.result((await again.forward_backward(model_id, 1)).json())
    assert await trainer_of(stack, model_id) == stack.trainer.trainer_id


@pytest.mark.parametrize("reason", ["alive", "another database"])
async def test_runs_of_a_trainer_that_cannot_be_fenced_wait_for_it(
    stack: Stack, client: Client, other: Backend, reason: str
) -> None:
    model_id = await run_on(client, other, stack)
    if reason == "alive":
        stack.trainer.moving_fails = [("FenceTrainer", NotReady("trainer 'b' is alive"))] * 1000
    else:
        stack.trainer.lost.clear()
    await other.stop()
    await fenced(stack, times=2)
    assert await stack.gateway.store.moves.all() == []
    await other.start()
    assert await client.result((await client.forward_backward(model_id, 1)).json())
    assert await trainer_of(stack, model_id) == other.servicer.trainer_id
    assert "AdoptModel" not in stack.trainer.move_calls


async def test_a_trainer_that_is_back_before_its_run_was_adopted_releases_it(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    stack.trainer.moving_fails = [("AdoptModel", NotReady("trainer 'b' is not fenced"))] * 1000
    await other.stop()
    await until(lambda: "AdoptModel" in stack.trainer.move_calls)
    stack.trainer.lost.clear()
    await other.start()
    await until(lambda: "ReleaseModel" in other.servicer.move_calls)
    stack.trainer.moving_fails = []
    assert await client.result((await client.forward_backward(model_id, 1)).json())
    assert await trainer_of(stack, model_id) == stack.trainer.trainer_id


async def test_a_run_that_the_lost_trainer_does_not_have_is_left_at_it(
    stack: Stack, client: Client, other: Backend
) -> None:
    model_id = await run_on(client, other, stack)
    del other.servicer.models[model_id]
    await other.stop()
    await until(lambda: "AdoptModel" in stack.trainer.move_calls)
    await fenced(stack, times=2)
    assert await trainer_of(stack, model_id) == other.servicer.trainer_id


async def test_with_0_nothing_is_adopted(stack: Stack, client: Client, other: Backend) -> None:
    model_id = await run_on(client, other, stack)
    await stack.restart_gateway(adopt_after_s=0)
    await all_reached(stack)
    await other.stop()
    await asyncio.sleep(1.0)
    assert not stack.trainer.move_calls
    assert await trainer_of(stack, model_id) == other.servicer.trainer_id
