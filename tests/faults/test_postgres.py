"""A PostgreSQL that is stopped at once, as in a crash, and started again: clients that train and sample see a delay."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from tests.faults import runs
from tests.faults.cluster import Cluster, wait_until
from tests.faults.moments import repeated
from tests.postgres import Postgres
from tests.postgres import running as running_postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = {"x-api-key": "tml-test"}
AWAY_S = (1.0, 6.0)
REQUESTS = 'gateway_requests_total{method="POST",route="forward_backward",status="200"}'


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    with running_postgres() as postgres:
        yield postgres


@pytest.fixture(scope="module")
def running(model: Path, database: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    env = {"GATEWAY_DATABASE_URL": database.new_database()}
    with Cluster(tmp_path_factory.mktemp("cluster"), model, num_samplers=1, gateway_env=env) as cluster:
        yield cluster


def get(cluster: Cluster, path: str, **params: Any) -> httpx.Response:
    return httpx.get(f"{cluster.url}/api/v1/{path}", params=params, headers=KEY, timeout=60, trust_env=False)


def used(cluster: Cluster) -> Counter[str]:
    """Tokens of each kind that the database has."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    asked = {"starting_on": hour - timedelta(hours=1), "ending_before": hour + timedelta(hours=1)}
    answer = get(cluster, "billing/usage/events", **{name: at.isoformat() for name, at in asked.items()})
    tokens: Counter[str] = Counter()
    for info in (event["event_info"] for event in answer.raise_for_status().json()["data"]):
        tokens[info["type"]] += info.get("token_count", info.get("count", 0))
    return tokens


@pytest.fixture(scope="module")
def undisturbed(running: Cluster) -> tuple[list[runs.Outcome], Counter[str]]:
    """What the runs leave, and what they use."""
    with tinker.ServiceClient(base_url=running.url, api_key="tml-test") as service:
        outcomes = runs.run_all(service, running.checkpoints)
    return outcomes, used(running)


@repeated
def test_nothing_is_lost_or_counted_twice(
    undisturbed: tuple[list[runs.Outcome], Counter[str]],
    cluster: Cluster,
    database: Postgres,
    rng: random.Random,
) -> None:
    expected, expected_used = undisturbed
    used_before, submitted = used(cluster), cluster.metrics()[REQUESTS]
    with (
        tinker.ServiceClient(base_url=cluster.url, api_key="tml-test") as service,
        runs.under_way(service, cluster.checkpoints) as outcomes,
    ):
        after = rng.randrange(1, runs.STEPS * runs.ROUNDS)
        wait_until(lambda: cluster.metrics()[REQUESTS] > submitted + after, what="it trains")
        database.stop()
        try:
            refused = get(cluster, "training_runs")
            time.sleep(rng.uniform(*AWAY_S))
        finally:
            database.start()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), refused.text
        runs.check_all(outcomes(), expected, exactly=False)
        listed = get(cluster, "training_runs", limit=len(runs.SEEDS)).raise_for_status().json()["training_runs"]
    saved = {
        checkpoint["checkpoint_id"]
        for run in listed
        for checkpoint in get(cluster, f"training_runs/{run['training_run_id']}/checkpoints").json()["checkpoints"]
    }
    assert saved >= {f"weights/round-{n}" for n in range(runs.ROUNDS)}
    assert used(cluster) - used_before == expected_used
