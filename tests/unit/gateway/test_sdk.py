"""The real SDK against a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.forking import run
from tests.unit.gateway import sdk_programs
from tests.unit.gateway.stack import Stack


async def run_program(program: Callable[[str], None], url: str) -> None:
    done = await run(program, url)
    assert done.status == 0, done.output


@pytest.mark.gateway(reap_interval_s=0.2)
async def test_sdk_trains_saves_loads_and_samples(stack: Stack) -> None:
    await run_program(sdk_programs.train_save_load_and_sample, stack.url)
    first, second = sorted(stack.trainer.orders)
    assert stack.trainer.orders[first] == [0, 1, 2, 3, 4, 5, 6]
    assert stack.trainer.orders[second] == [0, 1]
    await stack.trainer.deletion.wait()
    assert stack.trainer.deleted_models, "close() frees the models"


async def test_sdk_sees_failed_futures_and_goes_on(stack: Stack) -> None:
    await run_program(sdk_programs.fail_and_go_on, stack.url)


@pytest.mark.parametrize("with_one_poll", [True, False])
async def test_a_restart_in_the_middle_of_its_samples_is_a_delay_for_the_sdk(
    stack: Stack, *, with_one_poll: bool
) -> None:
    await stack.restart_gateway(sample_use_retrieve_futures=with_one_poll)
    stack.sampler.go.clear()
    program = asyncio.create_task(run_program(sdk_programs.sample_and_wait, stack.url))
    await stack.sampler.called.wait()
    await stack.restart_gateway()
    stack.sampler.go.set()
    await program


async def test_sdk_lists_the_models(stack: Stack) -> None:
    await run_program(sdk_programs.capabilities, stack.url)


async def test_a_rest_client_beside_a_training_client_in_the_documented_orders(stack: Stack) -> None:
    await run_program(sdk_programs.rest_client_beside_a_training_client, stack.url)
