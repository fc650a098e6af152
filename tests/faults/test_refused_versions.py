"""A version that was refused while a sampler was stopped: it does not serve that version when it goes on, and the one
that takes its place does not either."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
import tinker
from tinker import ModelInput, SamplingParams

from tests.faults.cluster import Cluster, Process
from tests.faults.moments import repeated
from tests.support.examples import batch, new_model, random_tokens, sample, train
from tests.support.waiting import wait_until
from tinsmith.errors import ServiceError, VersionNotLoaded, VersionRefused
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc, types_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHANNEL_TIMEOUT_S = 2.0
"""Short: a call of the trainer that ends with it is not what tells the sampler."""
STOPPED_S = 2 * CHANNEL_TIMEOUT_S
PROMPT = random_tokens(9, 4)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While it is there, the second sampler scores the canary wrongly."""
    return tmp_path_factory.mktemp("orders") / "wrong"


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory, order: Path, wrong: Path) -> Iterator[Cluster]:
    cluster = Cluster(
        tmp_path_factory.mktemp("cluster"),
        model,
        num_samplers=2,
        trainer_env={"TRAINER_CHANNEL_TIMEOUT_S": str(CHANNEL_TIMEOUT_S), "TRAINER_CHANNEL_SILENCE_S": "1"},
        sampler_env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    for sampler, at, scores in zip(cluster.samplers, (order, order.with_name("none")), ("none", wrong), strict=True):
        sampler.run_instead(Path(__file__).with_name("wrong_sampler.py"))
        sampler.set_env(FAULT_ORDER=str(at), WRONG_SCORES=str(scores))
    with cluster:
        yield cluster


@pytest.fixture(autouse=True)
def sound(cluster: Cluster, order: Path, wrong: Path) -> Iterator[None]:
    yield
    order.unlink(missing_ok=True)
    wrong.unlink(missing_ok=True)


def drawn(sampler: Process, version_id: str) -> int:
    """Tokens that this very process draws from a version. Raises what it says."""
    request = sampler_pb2.SampleRequest(
        version_id=version_id,
        prompt=[types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=np.array(PROMPT, "<i4").tobytes()))],
        num_samples=1,
        sampling_params=sampler_pb2.SamplingParams(max_tokens=3, stop=sampler_pb2.StopCondition()),
    )
    with grpc.insecure_channel(sampler.address) as channel:
        try:
            reply = sampler_pb2_grpc.SamplerServiceStub(channel).Sample(request, timeout=60)
        except grpc.RpcError as error:
            raise from_rpc_error(cast(Any, error)) from error
    return len(reply.sequences[0].tokens) // 4


def publish(cluster: Cluster, checkpoint: types_pb2.CheckpointInfo) -> int:
    """Again, by the trainer itself; the number of samplers that serve it then."""
    request = trainer_pb2.PublishCheckpointRequest(location=checkpoint.location, version_id=checkpoint.version_id)
    with grpc.insecure_channel(cluster.trainer.address) as channel:
        try:
            return trainer_pb2_grpc.TrainerServiceStub(channel).PublishCheckpoint(request, timeout=60).num_samplers
        except grpc.RpcError as error:
            raise from_rpc_error(cast(Any, error)) from error


def published(cluster: Cluster, training: tinker.TrainingClient) -> types_pb2.CheckpointInfo:
    """The checkpoint of the last save."""
    with grpc.insecure_channel(cluster.trainer.address) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        model = stub.GetModel(trainer_pb2.GetModelRequest(model_id=training.model_id), timeout=60).model
        location = f"{training.model_id}/ephemeral/{model.next_seq_id - 1}"
        return stub.GetCheckpoint(trainer_pb2.GetCheckpointRequest(location=location), timeout=60).checkpoint


def check_not_served(sampler: Process, version_id: str) -> None:
    for _ in range(5):
        with pytest.raises(VersionNotLoaded):
            drawn(sampler, version_id)


def refused_everywhere(cluster: Cluster, version_id: str) -> None:
    """By the one that goes on, and by the one that takes its place."""
    stopped, other = cluster.samplers
    check_not_served(other, version_id)
    stopped.resume()
    stopped.wait_serving()
    check_not_served(stopped, version_id)
    stopped.kill()
    cluster.heal()
    check_not_served(stopped, version_id)
    check_not_served(other, version_id)


def publish_to_both(cluster: Cluster, checkpoint: types_pb2.CheckpointInfo) -> None:
    """One that has just come back is in the group a moment later."""

    def both() -> bool:
        try:
            return publish(cluster, checkpoint) == 2
        except VersionRefused:
            raise
        except ServiceError:
            return False

    wait_until(both, what="both samplers serve the version")
    assert [drawn(sampler, checkpoint.version_id) for sampler in cluster.samplers] == [3, 3]


@repeated
def test_a_version_whose_certificate_fails_while_a_sampler_that_holds_it_is_stopped(
    cluster: Cluster,
    service: tinker.ServiceClient,
    order: Path,
    wrong: Path,
) -> None:
    client = new_model(service)
    client.save_weights_and_get_sampling_client().result()
    publish_to_both(cluster, published(cluster, client))
    train(client, batch(1), steps=2)
    order.write_text("after SIGSTOP")  # it holds the version, on probation
    wrong.touch()
    with pytest.raises(tinker.TinkerError, match="is refused: the sampler at"):
        client.save_weights_and_get_sampling_client().result()
    assert not order.exists(), "the sampler has not been stopped"
    refused = published(cluster, client)
    refused_everywhere(cluster, refused.version_id)
    wrong.unlink()
    publish_to_both(cluster, refused)


@repeated
def test_a_version_that_is_withdrawn_while_a_sampler_that_serves_it_is_stopped(
    cluster: Cluster,
    service: tinker.ServiceClient,
    wrong: Path,
) -> None:
    client = new_model(service)
    train(client, batch(1), steps=2)
    sampling = client.save_weights_and_get_sampling_client().result()
    checkpoint = published(cluster, client)
    publish_to_both(cluster, checkpoint)
    stopped = cluster.samplers[0]
    stopped.pause()
    wrong.touch()
    with pytest.raises(VersionRefused):
        publish(cluster, checkpoint)
    time.sleep(STOPPED_S)
    refused_everywhere(cluster, checkpoint.version_id)
    with pytest.raises(tinker.TinkerError, match="is refused: the sampler at"):
        sampling.sample(ModelInput.from_ints(PROMPT), 1, SamplingParams(max_tokens=3)).result()
    wrong.unlink()
    assert len(sample(sampling, PROMPT)[0].tokens) > 0
    publish_to_both(cluster, checkpoint)
