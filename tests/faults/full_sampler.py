"""A sampler whose memory for versions is full of one that is in use, so that it has no room for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import tinker

from tests.faults.cluster import Cluster, Process
from tests.support.examples import PROMPT, batch, new_model, train
from tests.support.waiting import wait_until
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, types_pb2

_NUM_OCCUPANTS = 3


def versions(sampler: Process) -> dict[str, sampler_pb2.VersionInfo]:
    """The versions that the sampler serves, by id."""
    request = sampler_pb2.ListVersionsRequest(page_size=1000)
    with grpc.insecure_channel(sampler.address) as channel:
        found = sampler_pb2_grpc.SamplerServiceStub(channel).ListVersions(request, timeout=60).versions
    return {version.version_id: version for version in found}


@contextmanager
def occupied(sampler: Process, version_id: str) -> Iterator[None]:
    """The sampler always generates with the version, so that it cannot evict it."""
    over = threading.Event()
    request = sampler_pb2.SampleRequest(
        version_id=version_id,
        prompt=[types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=np.array(PROMPT, "<i4").tobytes()))],
        num_samples=1,
        sampling_params=sampler_pb2.SamplingParams(max_tokens=200, stop=sampler_pb2.StopCondition()),
    )
    errors: list[grpc.RpcError] = []

    def generate() -> None:
        with grpc.insecure_channel(sampler.address) as channel:
            stub = sampler_pb2_grpc.SamplerServiceStub(channel)
            while not over.is_set() and not errors:
                try:
                    stub.Sample(request, timeout=60)
                except grpc.RpcError as error:
                    errors.append(error)

    threads = [threading.Thread(target=generate) for _ in range(_NUM_OCCUPANTS)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: versions(sampler)[version_id].num_running > 1, what="it generates")
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert errors == []


@contextmanager
def full(cluster: Cluster, service: tinker.ServiceClient, sampler: Process, *, rank: int) -> Iterator[None]:
    """The sampler's memory for versions has room for one, which is in use."""
    publish(new_model(service, rank), 1)
    (size,) = {version.size_bytes for other in cluster.samplers for version in versions(other).values()}
    sampler.restart({"SAMPLER_ADAPTER_MEMORY_BYTES": str(size * 3 // 2)})
    kept: list[str] = []

    def has_one() -> bool:
        training = new_model(service, rank)
        publish(training, 1)
        kept[:] = [version for version in versions(sampler) if version.startswith(f"{training.model_id}@")]
        return bool(kept)

    wait_until(has_one, what="it is the home of a version")
    with occupied(sampler, kept[0]):
        yield


def publish(training: tinker.TrainingClient, seed: int) -> tinker.SamplingClient:
    """Trains one step, and saves the weights to be sampled from."""
    train(training, batch(seed), steps=1)
    return training.save_weights_and_get_sampling_client().result()
