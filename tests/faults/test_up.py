"""`tinsmith up` starts again what is killed at random moments of training; its clients notice a delay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tinker

from tests.faults.moments import REPETITIONS, in_mode
from tests.faults.runs import Outcome, disturbed, run_all
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    in_mode("deterministic"),
    pytest.mark.parametrize("repetition", REPETITIONS, scope="module"),
]

REPORTED = ("was killed by SIGKILL", "; the others go on", ": ready again after")
"""Printed for each service that is killed."""

Kill = Callable[..., None]


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory, exactly: bool, repetition: int) -> Iterator[Stack]:
    """One for each repetition, because the pause before a service is started again grows each time. Leaving the block
    checks that nothing is left."""
    flags = ["--samplers", "2", *(["--deterministic"] if exactly else [])]
    env = {"TRAINER_SNAPSHOT_STEPS": "7"}  # a restart finds snapshots, and steps behind them
    folder = tmp_path_factory.mktemp(f"up-{repetition}")
    with Stack(folder, base_models=[f"{BASE_MODEL}={model}"], flags=flags, env=env) as stack:
        yield stack


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service:
        yield service


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[Outcome]:
    with tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service:
        return run_all(service, stack.checkpoints)


def running(stack: Stack, service: str) -> list[psutil.Process]:
    return stack.processes(service)


@pytest.fixture
def kill(
    stack: Stack, undisturbed: list[Outcome], service: tinker.ServiceClient, rng: random.Random, exactly: bool
) -> Kill:
    def kill_all(*victims: psutil.Process) -> None:
        """At one random moment of the runs; checks how they end, and that all are there again."""

        def times(said: str) -> int:
            return stack.report().count(said)

        expected = [times(said) + len(victims) for said in REPORTED]
        print(f"victims: {[victim.pid for victim in victims]}")
        with disturbed(service, stack.checkpoints, undisturbed, rng, exactly=exactly):
            for victim in victims:
                victim.kill()
        wait_until(lambda: times(REPORTED[-1]) == expected[-1], what="all are started again", limit_s=120)
        assert [times(said) for said in REPORTED] == expected

    return kill_all


def test_the_trainer_is_killed(stack: Stack, kill: Kill) -> None:
    (trainer,) = running(stack, "trainer_service")
    kill(trainer)


def test_the_gateway_is_killed(stack: Stack, kill: Kill) -> None:
    (gateway,) = running(stack, "gateway")
    kill(gateway)


def test_a_sampler_is_killed(stack: Stack, kill: Kill, rng: random.Random) -> None:
    kill(rng.choice(running(stack, "sampler_service")))


def test_all_three_are_killed(stack: Stack, kill: Kill) -> None:
    kill(*(process for name in ("trainer_service", "sampler_service", "gateway") for process in running(stack, name)))
