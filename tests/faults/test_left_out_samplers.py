"""A publish to four samplers of which one is full, one is dead and one hangs: the fourth serves the version, and the
others get it by themselves when they can."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker

from tests.faults.cluster import Cluster, Process
from tests.faults.full_sampler import full, publish, versions
from tests.support.examples import PROMPT, forward, new_model, random_tokens, sample, score
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TEXT = random_tokens(20, 3)


@pytest.fixture(scope="module", params=["all homes", "two homes", "full training"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory, kind: str) -> Iterator[Cluster]:
    env = {"two homes": {"TRAINER_VERSION_HOMES": "2"}, "full training": {"TRAINER_FULL_TRAINING": "true"}}
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, model, num_samplers=4, trainer_env=env.get(kind)) as cluster:
        yield cluster


def certificate(cluster: Cluster, sampling: tinker.SamplingClient) -> dict[str, Any]:
    sampler_id = sampling._sampling_session_id  # the SDK shows it nowhere else
    return httpx.get(f"{cluster.url}/api/v1/samplers/{sampler_id}/certificate", trust_env=False).json()


def reasons(cluster: Cluster, version_id: str) -> dict[str, str]:
    """Why samplers were left out when the version was published first, by address."""
    found = re.search(
        rf"number of samplers that serve {re.escape(version_id)}: 1; left out: ([^\"]*)",
        cluster.trainer.log.read_text(),
    )
    assert found is not None
    return dict(re.findall(r"(\S+) \((\w+)\)", found[1]))


def wait_caught_up(cluster: Cluster, sampling: tinker.SamplingClient, version_id: str, holders: set[Process]) -> None:
    """Samples until exactly these samplers serve the version. Nothing is saved meanwhile."""

    def is_there() -> bool:
        sample(sampling, PROMPT, max_tokens=1)
        return holders == {each for each in cluster.samplers if each.is_serving() and version_id in versions(each)}

    names = ", ".join(sorted(holder.name for holder in holders))
    wait_until(is_there, what=f"{names} serve the version", limit_s=120.0)


def test_the_fourth_serves_what_is_published_and_the_others_catch_up(
    cluster: Cluster, service: tinker.ServiceClient, kind: str
) -> None:
    rank = 0 if kind == "full training" else 8
    crowded, dead, hanging, fourth = cluster.samplers
    runs = [new_model(service, rank, seed=seed) for seed in range(3)]
    for run in runs:
        publish(run, 1)

    def check_publish(run: tinker.TrainingClient, seed: int) -> tuple[tinker.SamplingClient, str]:
        """Publishes a version, and returns its client and its id."""
        sampling = publish(run, seed)
        np.testing.assert_allclose(score(sampling, TEXT), forward(run, TEXT)[0], atol=1e-4)
        certified = certificate(cluster, sampling)
        assert certified["passed"]
        assert [gap["address"] for gap in certified["samplers"]] == [fourth.address]
        left_out = reasons(cluster, certified["version_id"])
        expected = {crowded.address: "full", dead.address: "gone", hanging.address: "not_serving"}
        assert left_out.items() <= expected.items()
        assert len(left_out) == 3 or kind == "two homes"
        return sampling, certified["version_id"]

    with full(cluster, service, crowded, rank=rank):
        dead.kill()
        hanging.pause()
        sampling, version_id = [check_publish(run, seed) for seed, run in enumerate(runs, 2)][-1]
        dead.start()
        dead.wait_serving()
        wait_caught_up(cluster, sampling, version_id, {fourth, dead})
        hanging.resume()
        hanging.wait_serving()
        if kind != "two homes":  # the version has its two holders
            wait_caught_up(cluster, sampling, version_id, {fourth, dead, hanging})
    if kind != "two homes":
        wait_caught_up(cluster, sampling, version_id, set(cluster.samplers))
    np.testing.assert_allclose(score(sampling, TEXT), forward(runs[-1], TEXT)[0], atol=1e-4)
