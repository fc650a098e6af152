"""A gateway that is killed between two steps of a client, and two gateways behind one PostgreSQL."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import ModelInput, SamplingParams

from tests.faults import runs
from tests.faults.cluster import Cluster
from tests.faults.moments import repeated
from tests.support.examples import PROMPT, new_model
from tests.support.postgres import Postgres
from tests.support.postgres import running as running_postgres
from tests.support.round_robin import RoundRobin, balanced
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

AWAY_S = 8.0
"""More than a gateway may be silent before the others take it for dead."""
KEY = {"x-api-key": "tml-test"}


class Wire:
    """Requests as the SDK sends them, one by one, so that a test knows between which two it kills."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def post(self, endpoint: str, /, **body: Any) -> Any:
        reply = httpx.post(
            f"{self._cluster.url}/api/v1/{endpoint}", json=body, headers=KEY, timeout=60, trust_env=False
        )
        assert reply.status_code == 200, reply.text
        return reply.json()

    def get(self, path: str) -> Any:
        return httpx.get(f"{self._cluster.url}/api/v1/{path}", headers=KEY, timeout=60, trust_env=False).json()

    def result(self, receipt: Any) -> Any:
        while (answer := self.post("retrieve_future", request_id=receipt["request_id"])).get("type") == "try_again":
            pass
        return answer


def restart(cluster: Cluster) -> None:
    cluster.gateway.kill()
    cluster.heal()


def test_each_step_outlives_the_gateway(cluster: Cluster) -> None:
    """Killed with -9 after each receipt: what had one is there."""
    wire = Wire(cluster)
    session_id = wire.post("create_session")["session_id"]
    restart(cluster)
    model = {"session_id": session_id, "model_seq_id": 0, "base_model": "tests/tiny", "lora_config": {"rank": 8}}
    created = wire.post("create_model", **model)
    restart(cluster)
    model_id = wire.result(created)["model_id"]
    assert wire.post("create_model", **model) == created
    save = {"model_id": model_id, "seq_id": 1, "path": "state", "ttl_seconds": 7200}
    saved = wire.post("save_weights", **save)
    restart(cluster)
    assert wire.post("save_weights", **save) == saved
    path = wire.result(saved)["path"]
    assert path == f"tinker://{model_id}/weights/state"
    for_sampler = wire.post("save_weights_for_sampler", model_id=model_id, seq_id=2, sampling_session_seq_id=0)
    restart(cluster)
    sampler_id = wire.result(for_sampler)["sampling_session_id"]
    body = {"session_id": session_id, "sampling_session_seq_id": 1, "base_model": "tests/tiny"}
    base_sampler_id = wire.post("create_sampling_session", **body)["sampling_session_id"]
    refused = wire.post("save_weights", model_id=model_id, seq_id=3, path="..")
    unknown = wire.post("optim_step", model_id="nobody:train:0", seq_id=1, adam_params={})
    restart(cluster)
    assert "'..'" in wire.result(refused)["error"]
    assert "nobody" in wire.result(unknown)["error"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    for number, sampler in enumerate((sampler_id, base_sampler_id)):
        ask = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1, "prompt": prompt}
        sampled = wire.result(wire.post("asample", **ask, sampling_params={"max_tokens": 4}))
        assert len(sampled["sequences"]) == 1
    wire.post("copy_weights", source_path=path, session_id=session_id, model_seq_id=5)
    restart(cluster)
    copy = wire.post("copy_weights", source_path=path, session_id=session_id, model_seq_id=5)["tinker_path"]
    checkpoint = f"training_runs/{copy.removeprefix('tinker://').replace('/weights/', '/checkpoints/weights/')}"
    url = f"{cluster.url}/api/v1/{checkpoint}"
    assert httpx.post(f"{url}/publish", headers=KEY, trust_env=False).status_code == 200
    assert httpx.put(f"{url}/ttl", headers=KEY, json={"ttl_seconds": 3600}, trust_env=False).status_code == 200
    restart(cluster)
    (listed,) = wire.get(f"{checkpoint.rpartition('/checkpoints/')[0]}/checkpoints")["checkpoints"]
    assert listed["public"]
    assert listed["expires_at"] is not None
    deleting = {**KEY, "x-idempotency-key": "once"}
    assert httpx.delete(url, headers=deleting, trust_env=False).status_code == 200
    restart(cluster)
    assert httpx.delete(url, headers=deleting, trust_env=False).status_code == 200
    events = [entry["event"] for entry in wire.get("audit")["entries"]]
    assert {"checkpoint_create", "checkpoint_publish", "checkpoint_ttl", "checkpoint_delete"} <= set(events)


@repeated
def test_a_save_is_indexed_though_its_gateway_and_its_client_are_gone(cluster: Cluster) -> None:
    wire = Wire(cluster)
    session_id = wire.post("create_session")["session_id"]
    model = {"session_id": session_id, "model_seq_id": 0, "base_model": "tests/tiny", "lora_config": {"rank": 8}}
    model_id = wire.result(wire.post("create_model", **model))["model_id"]
    wire.post("save_weights", model_id=model_id, seq_id=1, path="last")
    restart(cluster)
    listing = f"training_runs/{model_id}/checkpoints"
    wait_until(lambda: len(wire.get(listing)["checkpoints"]) == 1, what="the save is listed")


# Two gateways


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    with running_postgres() as postgres:
        yield postgres


@pytest.fixture(scope="module")
def pair(model: Path, database: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    env = {"GATEWAY_DATABASE_URL": database.new_database()}
    folder = tmp_path_factory.mktemp("pair")
    with Cluster(folder, model, num_samplers=1, gateway_env=env, num_gateways=2) as cluster:
        yield cluster


@pytest.fixture
def balancer(pair: Cluster) -> Iterator[tuple[str, RoundRobin]]:
    with balanced([f"http://{gateway.address}" for gateway in pair.gateways]) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(pair: Cluster) -> list[runs.Outcome]:
    """Through one of them alone."""
    with tinker.ServiceClient(base_url=pair.url, api_key="tml-test") as service:
        return runs.run_all(service, pair.checkpoints)


def test_two_gateways_are_as_one(
    pair: Cluster, balancer: tuple[str, RoundRobin], undisturbed: list[runs.Outcome]
) -> None:
    url, both = balancer
    with tinker.ServiceClient(base_url=url, api_key="tml-test") as service:
        outcomes = runs.run_all(service, pair.checkpoints)
    runs.check_all(outcomes, undisturbed, exactly=False)
    assert min(both.num_sent) > 0


@repeated
@pytest.mark.parametrize("is_kill", [True, False])
def test_one_of_two_gateways_goes_and_comes_back(
    pair: Cluster, balancer: tuple[str, RoundRobin], undisturbed: list[runs.Outcome], is_kill: bool
) -> None:
    """Each in turn, killed or stopped for longer than the others wait, while two runs go on."""
    url, both = balancer
    with (
        tinker.ServiceClient(base_url=url, api_key="tml-test") as service,
        runs.under_way(service, pair.checkpoints) as outcomes,
    ):
        for gateway in pair.gateways:
            before = sum(both.num_sent)
            wait_until(lambda before=before: sum(both.num_sent) > before + 20, what="requests are answered")
            gateway.kill() if is_kill else gateway.restart({})
            if is_kill:
                gateway.start()
            gateway.wait_serving()
        runs.check_all(outcomes(), undisturbed, exactly=False)


@repeated
def test_the_database_of_two_gateways_goes_and_comes_back(
    pair: Cluster,
    database: Postgres,
    balancer: tuple[str, RoundRobin],
    undisturbed: list[runs.Outcome],
    rng: random.Random,
) -> None:
    url, both = balancer
    with (
        tinker.ServiceClient(base_url=url, api_key="tml-test") as service,
        runs.under_way(service, pair.checkpoints) as outcomes,
    ):
        after = sum(both.num_sent) + rng.randrange(10, 100)
        wait_until(lambda: sum(both.num_sent) > after, what="requests are answered")
        database.stop()
        try:
            time.sleep(AWAY_S)
        finally:
            database.start()
        runs.check_all(outcomes(), undisturbed, exactly=False)


@repeated
def test_samples_of_a_gateway_that_stays_away_are_drawn_again(pair: Cluster, balancer: tuple[str, RoundRobin]) -> None:
    url, _ = balancer
    try:
        with tinker.ServiceClient(base_url=url, api_key="tml-test") as service:
            sampler = new_model(service).save_weights_and_get_sampling_client().result()
            params = SamplingParams(max_tokens=200, stop=[])
            drawing = [sampler.sample(ModelInput.from_ints(PROMPT), 1, params) for _ in range(24)]
            pair.gateways[0].kill()
            sampled = [drawn.result(timeout=120) for drawn in drawing]
            assert [len(one.sequences[0].tokens) for one in sampled] == [200] * 24
    finally:
        pair.heal()
