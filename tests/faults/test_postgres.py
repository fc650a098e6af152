"""A PostgreSQL that is stopped at once, as in a crash, or whose machine falls silent, and that comes back: clients that
train and sample see a delay."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from tests.faults import runs
from tests.faults.cables import Cable, cable
from tests.faults.cluster import Cluster
from tests.faults.moments import repeated
from tests.support.postgres import Postgres
from tests.support.postgres import running as running_postgres
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = {"x-api-key": "tml-test"}
AWAY_S = (1.0, 6.0)
SILENT_LIMIT_S = 40.0
"""By then who asks has heard that the database is away. A kernel alone waits for a quarter of an hour."""
REQUESTS = 'gateway_requests_total{method="POST",route="forward_backward",status="200"}'


@dataclass(frozen=True, slots=True)
class Database:
    postgres: Postgres
    cable: Cable | None
    """To its machine, which is to fall silent."""

    def go(self) -> None:
        self.postgres.stop() if self.cable is None else self.cable.pull()

    def come_back(self) -> None:
        self.postgres.start() if self.cable is None else self.cable.plug()


@pytest.fixture(scope="module", params=["stopped", "silent"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    if request.param == "stopped":
        with running_postgres() as postgres:
            yield Database(postgres, None)
        return
    with ExitStack() as stack:
        try:
            laid = stack.enter_context(cable())
        except OSError as error:
            pytest.skip(f"this user may not make a network: {error}")
        yield Database(stack.enter_context(running_postgres(address=laid.address, within=laid.within)), laid)


@pytest.fixture(scope="module")
def running(model: Path, database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    env = {"GATEWAY_DATABASE_URL": database.postgres.new_database()}
    with Cluster(tmp_path_factory.mktemp("cluster"), model, num_samplers=1, gateway_env=env) as cluster:
        yield cluster


def get(cluster: Cluster, path: str, **params: Any) -> httpx.Response:
    return httpx.get(
        f"{cluster.url}/api/v1/{path}", params=params, headers=KEY, timeout=SILENT_LIMIT_S, trust_env=False
    )


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
    """Outcomes and usage of the runs without a fault."""
    with tinker.ServiceClient(base_url=running.url, api_key="tml-test") as service:
        outcomes = runs.run_all(service, running.checkpoints)
    return outcomes, used(running)


@repeated
def test_nothing_is_lost_or_counted_twice(
    undisturbed: tuple[list[runs.Outcome], Counter[str]],
    cluster: Cluster,
    database: Database,
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
        database.go()
        try:
            refused = get(cluster, "training_runs")
            time.sleep(rng.uniform(*AWAY_S))
        finally:
            database.come_back()
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
