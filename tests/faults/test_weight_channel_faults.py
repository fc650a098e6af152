"""A sampler that is killed, or stopped, at every moment of a publish: nobody waits long, and training never notices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tinker

from tests.faults.cluster import Cluster, Process
from tests.support.examples import ADAM, Floats, batch, new_model, random_tokens, score
from tests.support.waiting import wait_until
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, types_pb2

pytestmark = pytest.mark.slow

SAVE_LIMIT_S = 30.0
"""Some seconds are what a machine that does nothing else needs; a timeout of the channel alone is as long as this."""

STOPPED_S = 30.0

MOMENTS = ["probe", "init", "start", "update", "middle", "finish", "after", "confirm"]
TEXT = random_tokens(20, 3)

ALL_FAULTS = os.environ.get("TINSMITH_ALL_FAULTS") == "1"
USUAL = {
    "auto": [
        ("init", "SIGKILL"),
        ("middle", "SIGKILL"),
        ("middle", "SIGSTOP"),
        ("finish", "SIGSTOP"),
        ("confirm", "SIGSTOP"),
    ],
    "gloo": [("middle", "SIGKILL"), ("middle", "SIGSTOP")],
}
"""Cases of `make test-slow`: each takes some 10 seconds."""


@pytest.fixture(scope="module", params=["auto", "gloo"])
def channel(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory, channel: str, order: Path) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("cluster"),
        model,
        num_samplers=2,
        trainer_env={"TRAINER_CHANNEL": channel, "TRAINER_CHANNEL_BUCKET_BYTES": "65536"},
        sampler_env={"FAULT_ORDER": str(order)},
    )
    cluster.samplers[0].run_instead(Path(__file__).with_name("faulty_sampler.py"))
    with cluster:
        yield cluster


@dataclass(frozen=True, slots=True)
class Run:
    losses: list[float]
    scores: Floats
    """Logprobs of TEXT, by the version that was saved in the middle."""
    seconds: float
    """That the save took."""
    training: tinker.TrainingClient


def run(service: tinker.ServiceClient) -> Run:
    """Ten steps, all submitted without waiting; after the fifth a save."""
    client = new_model(service, rank=32)
    data = batch(1)

    def steps() -> list[Any]:
        return [(client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)) for _ in range(5)]

    before = steps()
    before[-1][1].result()
    began = time.monotonic()
    saving = client.save_weights_and_get_sampling_client()
    after = steps()
    sampler = saving.result()
    seconds = time.monotonic() - began
    losses = [forward_backward.result().metrics["loss:sum"] for forward_backward, _ in before + after]
    for _, step in after:
        step.result()
    return Run(losses, score(sampler, TEXT), seconds, client)


@pytest.fixture(scope="module")
def undisturbed(running: Cluster) -> Iterator[Run]:
    with tinker.ServiceClient(base_url=running.url, api_key="tml-test") as service:
        yield run(service)


def versions(sampler: Process) -> set[str]:
    with grpc.insecure_channel(sampler.address) as channel:
        reply = sampler_pb2_grpc.SamplerServiceStub(channel).ListVersions(
            sampler_pb2.ListVersionsRequest(page_size=1000), timeout=10
        )
    assert not reply.next_page_token
    return {version.version_id for version in reply.versions}


def scored(sampler: Process, version_id: str) -> Floats:
    """By this very process."""
    request = sampler_pb2.SampleRequest(
        version_id=version_id,
        prompt=[types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=np.array(TEXT, "<i4").tobytes()))],
        num_samples=1,
        sampling_params=sampler_pb2.SamplingParams(max_tokens=1),
        prompt_logprobs=True,
    )
    with grpc.insecure_channel(sampler.address) as channel:
        reply = sampler_pb2_grpc.SamplerServiceStub(channel).Sample(request, timeout=60)
    return np.frombuffer(reply.prompt_logprobs, "<f4")[1:]


def publish_until_both_have_it(cluster: Cluster, training: tinker.TrainingClient) -> str:
    """Returns the version. A sampler that has just come back is in a group a moment later."""
    found: set[str] = set()

    def both() -> bool:
        old = versions(cluster.samplers[1])
        training.save_weights_and_get_sampling_client().result()
        found.update(versions(cluster.samplers[1]) - old)
        return bool(found & versions(cluster.samplers[0]))

    wait_until(both, what="both samplers get what is published")
    return (found & versions(cluster.samplers[0])).pop()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_sampler_lost_at_any_moment_of_a_publish(
    cluster: Cluster,
    order: Path,
    service: tinker.ServiceClient,
    undisturbed: Run,
    channel: str,
    moment: str,
    signal: str,
) -> None:
    if (moment, channel) == ("probe", "gloo"):
        pytest.skip("nobody is asked where it is")
    if not ALL_FAULTS and (moment, signal) not in USUAL[channel]:
        pytest.skip("minutes more: with TINSMITH_ALL_FAULTS=1")
    faulty, sound = cluster.samplers
    publish_until_both_have_it(cluster, undisturbed.training)
    known = versions(sound)
    order.write_text(f"{moment} {signal}")
    if moment in ("probe", "init"):  # a group is formed as soon as it is back, and the run finds that under way
        faulty.kill()
        faulty.start()
        wait_until(lambda: not order.exists(), what=f"the sampler reaches {moment}")
    disturbed = run(service)
    assert not order.exists(), f"the sampler has not come to {moment}"
    assert disturbed.losses == undisturbed.losses
    np.testing.assert_allclose(disturbed.scores, undisturbed.scores, atol=1e-5)
    assert disturbed.seconds < SAVE_LIMIT_S
    (version,) = versions(sound) - known

    if signal == "SIGSTOP":
        if (moment, channel) == ("middle", "auto"):
            time.sleep(max(0.0, STOPPED_S - disturbed.seconds))
        faulty.resume()
        faulty.wait_serving()
        time.sleep(1.0)  # for whatever it was in the middle of
        assert (version in versions(faulty)) == (moment == "confirm"), "only what was measured is served"
        if moment == "confirm":
            np.testing.assert_array_equal(scored(faulty, version), scored(sound, version))
    cluster.heal()
    version = publish_until_both_have_it(cluster, disturbed.training)
    np.testing.assert_array_equal(scored(faulty, version), scored(sound, version))
