"""Three trainers with one PostgreSQL database and one bucket: two are lost for good, their runs go on at the third."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker

from tests.faults import runs
from tests.faults.cluster import Cluster
from tests.faults.moments import repeated
from tests.support.postgres import running as running_postgres
from tests.support.stores import BUCKET, s3
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDS = range(1, 7)
"""Two runs for each trainer."""
STORE = f"s3://{BUCKET}/adopted"


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_postgres() as postgres, s3() as credentials:
        url = postgres.new_database().replace("+asyncpg", "")
        exact = {"TRAINER_DETERMINISTIC": "true", "TRAINER_TOKEN_BUDGET": "40", "TRAINER_SNAPSHOT_STEPS": "3"}
        with Cluster(
            tmp_path_factory.mktemp("cluster"),
            model,
            num_samplers=1,
            num_trainers=3,
            checkpoint_dir=STORE,
            trainer_env={**exact, **credentials, "TRAINER_JOURNAL": url},
            gateway_env={"GATEWAY_ADOPT_AFTER_S": "3"},
        ) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def undisturbed(running: Cluster) -> list[runs.Outcome]:
    with tinker.ServiceClient(base_url=running.url, api_key="tml-test") as service:
        return runs.run_all(service, STORE, seeds=SEEDS)


@repeated
def test_two_of_three_trainers_are_lost_and_no_client_notices_more_than_a_delay(
    undisturbed: list[runs.Outcome], cluster: Cluster, service: tinker.ServiceClient, rng: random.Random
) -> None:
    killed, stopped, last = rng.sample(cluster.trainers, 3)
    before, most = _trained_tokens(cluster), len(SEEDS) * runs.TOKENS
    moment = before + rng.uniform(0.05, 0.6) * most
    with runs.under_way(service, STORE, seeds=SEEDS) as outcomes:
        wait_until(lambda: _trained_tokens(cluster) > moment, what="the runs are under way", limit_s=600)
        stopped.pause()
        time.sleep(rng.uniform(0, 2))
        killed.kill()
        assert _trained_tokens(cluster) < before + most, "the runs were over before"
        shutil.rmtree(cluster.folder / killed.name)
        runs.check_all(outcomes(), undisturbed, exactly=True)
    assert last.is_serving()
    assert not stopped.is_serving()
    stopped.resume()
    wait_until(lambda: not stopped.is_running, what="the trainer that was stopped ends", limit_s=60)
    assert stopped.status == 1
    assert "has taken over the journal" in stopped.tail()
    cluster.heal()
    others = {killed.address, stopped.address}
    wait_until(  # runs of clients that have gone are freed by the reaper
        lambda: [one["num_runs"] for one in _trainers(cluster) if one["address"] in others] == [0, 0],
        what="no run is left at the trainers that were lost",
        limit_s=120,
    )


def _trained_tokens(cluster: Cluster) -> float:
    return cluster.metrics()["gateway_trained_tokens_total"]


def _trainers(cluster: Cluster) -> list[dict[str, object]]:
    reply = httpx.get(f"{cluster.url}/api/v1/trainers", headers={"x-api-key": "tml-test"}, trust_env=False)
    return reply.raise_for_status().json()["trainers"]
