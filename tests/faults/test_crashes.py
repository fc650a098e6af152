"""Training that is disturbed at random moments ends where undisturbed training ends; its client notices a delay."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

from tests.faults.cluster import Cluster, Process
from tests.faults.moments import in_mode, repeated
from tests.faults.power_cut import cut_power
from tests.faults.runs import Outcome, disturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LONGEST_PAUSE_S = 1.0
"""Before what was killed is started again, as `tinsmith up` does it the first time."""

Disturb = Callable[..., None]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory, exactly: bool) -> Iterator[Cluster]:
    # A restart finds snapshots, and steps behind them.
    trainer_env = {"TRAINER_SNAPSHOT_STEPS": "7", "TRAINER_DETERMINISTIC": str(exactly)}
    with Cluster(tmp_path_factory.mktemp("cluster"), model, num_samplers=1, trainer_env=trainer_env) as cluster:
        yield cluster


@pytest.fixture
def disturb(
    cluster: Cluster, undisturbed: list[Outcome], service: tinker.ServiceClient, rng: random.Random, exactly: bool
) -> Disturb:
    def end_and_start(*victims: Process, in_good_order: bool = False, power_cut: bool = False) -> None:
        """At one random moment of the runs; checks how they end."""
        print(f"victims: {', '.join(one.name for one in victims)}")
        with disturbed(service, cluster.checkpoints, undisturbed, rng, exactly=exactly):
            for victim in victims:
                victim.stop() if in_good_order else victim.kill()
            if power_cut:
                print(cut_power(cluster.journal.with_name(f"{cluster.journal.name}-wal"), rng))
            time.sleep(rng.uniform(0, LONGEST_PAUSE_S))
            for victim in victims:
                victim.start()

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
