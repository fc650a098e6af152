"""Sample requests that kill their samplers: no more than three die of one, and whatever else was there is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tinker
from tinker import ModelInput, SamplingParams

from tests.faults.cluster import Cluster
from tests.faults.poisoned_sampler import MARK
from tests.support.examples import BASE_MODEL, new_model, random_tokens
from tests.support.waiting import wait_until
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, types_pb2

pytestmark = pytest.mark.slow

KILLED = "samplers ended while they computed this request, so it is not given to another"
NUM_OTHERS = 24
NUM_TOKENS = 300
"""Length of the innocent samples, which are therefore in work long before and after a death."""


_words = count(3)


def guilty_prompt(after: int) -> list[int]:
    """A prompt that kills its sampler. Each is another one, because the gateway refuses what was condemned before."""
    return [MARK, after, next(_words)]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), model, num_samplers=2)
    for sampler in cluster.samplers:
        sampler.run_instead(Path(__file__).with_name("poisoned_sampler.py"))
    with cluster:
        yield cluster


@pytest.fixture
def deaths(cluster: Cluster) -> Iterator[Callable[[], int]]:
    """How many samplers have ended. They are started again at once, as by a supervisor."""
    number, ended = 0, threading.Event()

    def supervise() -> None:
        nonlocal number
        while not ended.wait(0.05):
            for sampler in cluster.samplers:
                if not sampler.is_running:
                    number += 1
                    sampler.start()

    thread = threading.Thread(target=supervise)
    thread.start()
    yield lambda: number
    ended.set()
    thread.join()


class Others:
    """Samples of other clients, of two versions and the base model, in work on both samplers."""

    def __init__(self, service: tinker.ServiceClient) -> None:
        clients = [new_model(service).save_weights_and_get_sampling_client().result() for _ in range(2)]
        clients.append(service.create_sampling_client(base_model=BASE_MODEL).result())
        params = SamplingParams(max_tokens=NUM_TOKENS, stop=[])
        prompts = [[1, *random_tokens(20, n)] for n in range(NUM_OTHERS)]
        self._pending = [
            clients[n % 3].sample(ModelInput.from_ints(prompt), 1, params) for n, prompt in enumerate(prompts)
        ]

    def check(self) -> None:
        for future in self._pending:
            (sequence,) = future.result().sequences
            assert len(sequence.tokens) == NUM_TOKENS


@pytest.mark.parametrize("num_guilty", [1, 2])
@pytest.mark.parametrize("after", [0, 40], ids=["with its prompt", "with its output"])
def test_requests_that_kill_samplers_fail_alone(
    service: tinker.ServiceClient, deaths: Callable[[], int], after: int, num_guilty: int
) -> None:
    client = service.create_sampling_client(base_model=BASE_MODEL).result()
    others = Others(service)
    params = SamplingParams(max_tokens=100, stop=[])
    prompts = [ModelInput.from_ints(guilty_prompt(after)) for _ in range(num_guilty)]
    guilty = [client.sample(prompt, 1, params) for prompt in prompts]
    for future in guilty:
        with pytest.raises(tinker.RequestFailedError, match=KILLED):
            future.result()
    others.check()
    # A prompt is computed alone at its second death. Output has company at its first two, and is alone at the third.
    assert 2 <= deaths() <= (3 if after else 2) * num_guilty


@pytest.mark.parametrize("stream", [False, True])
def test_so_does_one_of_the_openai_api(
    cluster: Cluster, service: tinker.ServiceClient, deaths: Callable[[], int], stream: bool
) -> None:
    others = Others(service)
    body = {"model": BASE_MODEL, "prompt": guilty_prompt(0), "max_tokens": 100, "stream": stream}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=240, trust_env=False)
    assert KILLED in reply.text
    others.check()
    assert deaths() == 2


def test_one_whose_gateway_is_killed_between_two_deaths_is_counted_on(
    cluster: Cluster, service: tinker.ServiceClient, deaths: Callable[[], int]
) -> None:
    client = service.create_sampling_client(base_model=BASE_MODEL).result()
    others = Others(service)
    tokens = guilty_prompt(40)
    prompt, params = ModelInput.from_ints(tokens), SamplingParams(max_tokens=100, stop=[])
    guilty = client.sample(prompt, 1, params)

    def num_tries() -> int:
        return sum(sampler.log.read_text().count(f" computes {tokens[2]}\n") for sampler in cluster.samplers)

    # Before the second sampler gets it, its death is written.
    wait_until(lambda: num_tries() == 2, what="the request kills a sampler, and comes to another one")
    cluster.gateway.kill()
    cluster.gateway.start()
    with pytest.raises(tinker.RequestFailedError, match=KILLED):
        guilty.result()
    others.check()
    num_deaths = deaths()
    assert 2 <= num_deaths <= 3
    cluster.gateway.kill()
    cluster.gateway.start()
    with pytest.raises(tinker.RequestFailedError, match=KILLED):
        client.sample(prompt, 1, params).result()
    assert deaths() == num_deaths


def test_a_call_over_grpc_kills_the_sampler_that_its_client_has_called_and_no_other(
    cluster: Cluster, deaths: Callable[[], int]
) -> None:
    tokens = np.array([MARK, 0, 3], "<i4").tobytes()
    request = sampler_pb2.SampleRequest(
        prompt=[types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=tokens))],
        num_samples=1,
        sampling_params=sampler_pb2.SamplingParams(max_tokens=100),
    )
    other = cluster.samplers[1].pid
    with grpc.insecure_channel(cluster.samplers[0].address) as channel:
        stub: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Sample(request)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    wait_until(lambda: deaths() == 1 and cluster.samplers[0].is_serving(), what="the sampler is back")
    assert cluster.samplers[1].pid == other
    assert deaths() == 1


@pytest.fixture
def three(model: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of three samplers, of which nobody starts again those that ended."""
    cluster = Cluster(tmp_path, model, num_samplers=3)
    for sampler in cluster.samplers:
        sampler.run_instead(Path(__file__).with_name("poisoned_sampler.py"))
    with cluster:
        yield cluster


@pytest.mark.parametrize("door", ["api", "v1", "v1 stream"])
def test_a_request_that_killed_two_samplers_is_not_given_to_the_third_which_goes_on_with_the_others(
    three: Cluster, door: str
) -> None:
    pids = [sampler.pid for sampler in three.samplers]
    with tinker.ServiceClient(base_url=three.url, api_key="tml-test") as service:
        others = Others(service)
        if door == "api":
            client = service.create_sampling_client(base_model=BASE_MODEL).result()
            params = SamplingParams(max_tokens=100, stop=[])
            with pytest.raises(tinker.RequestFailedError, match=f"2 {KILLED}"):
                client.sample(ModelInput.from_ints([MARK, 0, 3]), 1, params).result()
        else:
            body = {"model": BASE_MODEL, "prompt": [MARK, 0, 3], "max_tokens": 100, "stream": door == "v1 stream"}
            reply = httpx.post(f"{three.url}/v1/completions", json=body, timeout=240, trust_env=False)
            assert f"2 {KILLED}" in reply.text
        others.check()
        assert sorted(sampler.is_running for sampler in three.samplers) == [False, False, True]
        assert [sampler.pid for sampler in three.samplers] == pids
        Others(service).check()
