"""Training that is disturbed at random moments ends where undisturbed training ends; its client notices a delay."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

from tests.faults.cluster import Cluster, Process
from tests.faults.moments import ALL_FAULTS, repeated
from tests.faults.power_cut import cut_power
from tests.faults.runs import Outcome, check_all, run_all, under_way

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LONGEST_PAUSE_S = 1.0
"""Before what was killed is started again, as `tinsmith up` does it the first time."""

Disturb = Callable[..., None]


def in_mode(usual: str) -> pytest.MarkDecorator:
    """Of the trainer; with "deterministic" the numbers are the same bit for bit. Each fault in one of them usually, in
    both with TINSMITH_ALL_FAULTS=1."""
    modes = ["usual", "deterministic"] if ALL_FAULTS else [usual]
    return pytest.mark.parametrize("mode", modes, scope="module", indirect=True)


@pytest.fixture(scope="module")
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory, mode: str) -> Iterator[Cluster]:
    trainer_env = {"TRAINER_SNAPSHOT_STEPS": "7"}  # a restart finds snapshots, and steps behind them
    if mode == "deterministic":
        trainer_env["TRAINER_DETERMINISTIC"] = "true"
    with Cluster(tmp_path_factory.mktemp("cluster"), model, num_samplers=1, trainer_env=trainer_env) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(running: Cluster) -> list[Outcome]:
    running.heal()
    with tinker.ServiceClient(base_url=running.url, api_key="tml-test") as service:
        return run_all(service, running.checkpoints)


@pytest.fixture
def disturb(
    cluster: Cluster, undisturbed: list[Outcome], service: tinker.ServiceClient, rng: random.Random, mode: str
) -> Disturb:
    def end_and_start(*victims: Process, in_good_order: bool = False, power_cut: bool = False) -> None:
        """At one random moment of the runs; checks how they end."""
        longest_s = max(outcome.seconds for outcome in undisturbed)
        with under_way(service, cluster.checkpoints) as outcomes:
            moment_s = rng.uniform(0, longest_s)
            print(f"ended after {moment_s:.2f} s of {longest_s:.2f} s: {', '.join(one.name for one in victims)}")
            time.sleep(moment_s)
            for victim in victims:
                victim.stop() if in_good_order else victim.kill()
            if power_cut:
                print(cut_power(cluster.journal.with_name(f"{cluster.journal.name}-wal"), rng))
            time.sleep(rng.uniform(0, LONGEST_PAUSE_S))
            for victim in victims:
                victim.start()
            check_all(outcomes(), undisturbed, exactly=mode == "deterministic")

    return end_and_start


@in_mode("deterministic")
@repeated
def test_the_trainer_is_killed(cluster: Cluster, disturb: Disturb) -> None:
    disturb(cluster.trainer)


@in_mode("usual")
@repeated
def test_the_gateway_is_killed(cluster: Cluster, disturb: Disturb) -> None:
    disturb(cluster.gateway)


@in_mode("usual")
@repeated
def test_the_sampler_is_killed(cluster: Cluster, disturb: Disturb) -> None:
    disturb(*cluster.samplers)


@in_mode("usual")
@repeated
def test_all_three_are_killed(cluster: Cluster, disturb: Disturb) -> None:
    disturb(*cluster.processes)


@in_mode("usual")
@repeated
def test_an_operator_restarts_some_of_them(cluster: Cluster, disturb: Disturb, rng: random.Random) -> None:
    """By SIGTERM, in any order: what is under way is answered, or left to those that come after."""
    disturb(*rng.sample(cluster.processes, rng.randint(1, len(cluster.processes))), in_good_order=True)


@in_mode("deterministic")
@repeated
def test_the_power_is_cut_while_the_journal_is_written(cluster: Cluster, disturb: Disturb) -> None:
    disturb(*cluster.processes, power_cut=True)
