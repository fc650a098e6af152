"""More samplers than a version has homes: each run is sampled at its own sampler, at another one when that is lost, and
at more of them while it is busy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import tinker

from tests.faults.cluster import Cluster, Process
from tests.support.examples import PROMPT, batch, new_model, random_tokens, sample, train
from tests.support.waiting import wait_until
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GREEDY = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("cluster"),
        model,
        num_samplers=3,
        trainer_env={"TRAINER_VERSION_HOMES": "1"},
        sampler_env={"SAMPLER_MAX_RUNNING": "2"},
    ) as cluster:
        yield cluster


def holders(cluster: Cluster, training: tinker.TrainingClient) -> list[Process]:
    """The samplers that hold a version of the run."""

    def holds(sampler: Process) -> bool:
        request = sampler_pb2.ListVersionsRequest(page_size=1000)
        with grpc.insecure_channel(sampler.address) as channel:
            versions = sampler_pb2_grpc.SamplerServiceStub(channel).ListVersions(request, timeout=60).versions
        return any(version.version_id.startswith(f"{training.model_id}@") for version in versions)

    return [sampler for sampler in cluster.samplers if sampler.is_running and holds(sampler)]


def trained(service: tinker.ServiceClient, seed: int) -> tuple[tinker.TrainingClient, tinker.SamplingClient]:
    training = new_model(service, seed=seed)
    train(training, batch(seed), steps=2)
    return training, training.save_weights_and_get_sampling_client().result()


def test_each_run_is_sampled_at_its_home_and_elsewhere_when_that_is_lost(
    cluster: Cluster, service: tinker.ServiceClient
) -> None:
    runs = [trained(service, seed) for seed in range(4)]
    before = [sample(sampling, PROMPT, **GREEDY)[0].tokens for _, sampling in runs]
    homes = [holders(cluster, training) for training, _ in runs]
    assert [len(each) for each in homes] == [1] * len(runs)
    lost = homes[0][0]
    lost.kill()
    assert [sample(sampling, PROMPT, **GREEDY)[0].tokens for _, sampling in runs] == before
    now = [holders(cluster, training) for training, _ in runs]
    for home, at in zip(homes, now, strict=True):
        assert len(at) == 1
        assert home == at or home == [lost]


def test_a_version_whose_home_is_busy_is_sampled_at_more_samplers(
    cluster: Cluster, service: tinker.ServiceClient
) -> None:
    training, sampling = trained(service, 9)
    assert len(holders(cluster, training)) == 1
    params = tinker.SamplingParams(max_tokens=60, stop=[])
    prompts = [tinker.ModelInput.from_ints(random_tokens(9, seed)) for seed in range(8)]
    answers = [sampling.sample(prompt, 4, params) for prompt in prompts]
    wait_until(lambda: len(holders(cluster, training)) > 1, what="another sampler holds the version")
    assert [len(answer.result().sequences) for answer in answers] == [4] * len(answers)
