"""Samplers that are killed, or stopped, in the middle of work: every future is resolved, by the version that was asked
for, and training never notices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx
import numpy as np
import pytest
import tinker
from tinker import ModelInput, SamplingParams

from tests.faults.cluster import Cluster, Process
from tests.faults.moments import repeated
from tests.support.examples import BASE_MODEL, batch, forward, new_model, random_tokens, sample, train
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, repeated]

FAST = tinker.AdamParams(learning_rate=5e-3)
STEPS = 3
OUT_LIMIT_S = 5.0
"""A sampler that does not answer gets no requests after that."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Two versions of a run that say very different things, and what trains on as each of them."""

    samplers: Sequence[tinker.SamplingClient]
    clients: Sequence[tinker.TrainingClient]

    def check(self, n: int, prompt: Sequence[int], sequence: tinker.SampledSequence) -> None:
        """Asserts that the sequence has the logprobs of version n, and not those of the other version."""
        assert sequence.logprobs_np is not None
        gaps = [
            np.abs(sequence.logprobs_np - forward(client, [*prompt, *sequence.tokens])[0][len(prompt) - 1 :]).max()
            for client in self.clients
        ]
        assert gaps[n] < 1e-4 < 0.01 < gaps[1 - n]


@pytest.fixture
def versions(service: tinker.ServiceClient) -> Versions:
    client = new_model(service)
    train(client, batch(1), steps=STEPS, adam=FAST)
    state = client.save_state("early").result().path
    early = client.save_weights_and_get_sampling_client().result()
    train(client, batch(2), steps=STEPS, adam=FAST)
    late = client.save_weights_and_get_sampling_client().result()
    return Versions([early, late], [service.create_training_client_from_state(state).result(), client])


@pytest.fixture
def undisturbed(service: tinker.ServiceClient) -> Iterator[Callable[[], None]]:
    """Begins to train; at the end of the test the losses are those of the same steps in peace."""
    quiet = train(new_model(service, seed=5), batch(3, lengths=(40, 60, 20)), steps=20)
    client = new_model(service, seed=5)
    pending = []

    def begin() -> None:
        for _ in range(20):
            pending.append(client.forward_backward(batch(3, lengths=(40, 60, 20)), "cross_entropy"))
            client.optim_step(tinker.AdamParams(learning_rate=1e-3))

    yield begin
    assert pending
    assert [one.result().metrics["loss:sum"] for one in pending] == quiet


NUM_GENERATIONS = 64


class Burst:
    """Generations of two versions."""

    def __init__(self, versions: Versions, *, num_tokens: int = 300) -> None:
        self._versions = versions
        self._num_tokens = num_tokens
        self._prompts = [random_tokens(20, n) for n in range(NUM_GENERATIONS)]
        params = SamplingParams(max_tokens=num_tokens, stop=[])
        self._pending = [
            versions.samplers[n % 2].sample(ModelInput.from_ints(prompt), 1, params)
            for n, prompt in enumerate(self._prompts)
        ]

    def check(self) -> None:
        results = [future.result() for future in self._pending]
        for n, (prompt, result) in enumerate(zip(self._prompts, results, strict=True)):
            (sequence,) = result.sequences
            assert len(sequence.tokens) == self._num_tokens
            if n % 8 < 2:
                self._versions.check(n % 2, prompt, sequence)


def metric(cluster: Cluster, name: str, sampler: Process, **labels: str) -> float:
    pairs = ",".join(f'{key}="{value}"' for key, value in sorted(({"sampler": sampler.address} | labels).items()))
    found, key = cluster.metrics(), f"{name}{{{pairs}}}"
    return found.get(key, 0.0) if name.endswith("_total") else found[key]  # a counter is there once it has counted


def state(cluster: Cluster, sampler: Process) -> str:
    name = "gateway_sampler_state"
    states = ("gone", "silent", "loading", "serving")
    # It may change between two of these questions: then there is no answer yet.
    return next((state for state in states if metric(cluster, name, sampler, **{name: state}) == 1), "")


def wait_busy(cluster: Cluster, *samplers: Process) -> None:
    wait_until(
        lambda: all(metric(cluster, "gateway_sampler_sequences", sampler) > 8 for sampler in samplers),
        what="all have work",
    )


def wait_back(cluster: Cluster, *samplers: Process) -> None:
    wait_until(lambda: all(state(cluster, sampler) == "serving" for sampler in samplers), what="all are taken back")


def wait_used(cluster: Cluster, versions: Versions, *samplers: Process) -> None:
    """All of them have the versions. A sampler that has just come back gets them a moment after it serves, and a burst
    before that would go to the others as a whole."""

    def num_requests() -> list[float]:
        return [metric(cluster, "gateway_sampler_requests_total", sampler) for sampler in samplers]

    served = num_requests()

    def are_used() -> bool:
        Burst(versions, num_tokens=5).check()
        return all(now > before for now, before in zip(num_requests(), served, strict=True))

    wait_until(are_used, what="all get requests")


def test_one_of_two_samplers_is_killed(cluster: Cluster, versions: Versions, undisturbed: Callable[[], None]) -> None:
    wait_back(cluster, *cluster.samplers)
    wait_used(cluster, versions, *cluster.samplers)
    resubmitted = metric(cluster, "gateway_resubmissions_total", cluster.samplers[0])
    undisturbed()
    burst = Burst(versions)
    wait_busy(cluster, *cluster.samplers)
    cluster.samplers[0].kill()
    wait_until(lambda: state(cluster, cluster.samplers[0]) == "gone", what="it is out", limit_s=OUT_LIMIT_S)
    burst.check()
    assert metric(cluster, "gateway_resubmissions_total", cluster.samplers[0]) > resubmitted


def test_the_only_sampler_is_killed(cluster: Cluster, versions: Versions, undisturbed: Callable[[], None]) -> None:
    """Its versions are published to the one that takes its place."""
    cluster.samplers[1].kill()
    undisturbed()
    burst = Burst(versions)
    wait_busy(cluster, cluster.samplers[0])
    cluster.samplers[0].kill()
    cluster.samplers[0].start()
    burst.check()


def test_a_sampler_is_killed_while_it_starts_and_gets_its_versions_when_it_is_there(
    cluster: Cluster, versions: Versions
) -> None:
    late = cluster.samplers[1]
    late.kill()
    late.start()
    wait_until(lambda: "listening on" in late.log.read_text().rpartition("configuration:")[2], what="it loads")
    late.kill()
    sample(versions.samplers[1], random_tokens(9, 1))
    cluster.heal()
    wait_back(cluster, late)
    served = metric(cluster, "gateway_sampler_requests_total", late)
    refused = late.log.read_text().count("VERSION_NOT_LOADED")

    def is_used() -> bool:
        prompt = random_tokens(20, int(1000 * served) % 997)
        versions.check(1, prompt, sample(versions.samplers[1], prompt)[0])
        Burst(versions, num_tokens=5).check()
        return metric(cluster, "gateway_sampler_requests_total", late) > served

    wait_until(is_used, what="the sampler that came back gets requests")
    assert late.log.read_text().count("VERSION_NOT_LOADED") == refused


def test_one_of_two_samplers_is_stopped_and_goes_on_later(
    cluster: Cluster, versions: Versions, undisturbed: Callable[[], None]
) -> None:
    wait_back(cluster, *cluster.samplers)
    wait_used(cluster, versions, *cluster.samplers)
    stopped, other = cluster.samplers
    resubmitted = metric(cluster, "gateway_resubmissions_total", stopped)
    undisturbed()
    burst = Burst(versions)
    wait_busy(cluster, stopped, other)
    stopped.pause()
    wait_until(lambda: state(cluster, stopped) == "silent", what="it is out", limit_s=OUT_LIMIT_S)
    wait_until(lambda: metric(cluster, "gateway_sampler_sequences", stopped) == 0, what="its work is elsewhere")
    burst.check()  # while it is stopped
    once = NUM_GENERATIONS  # more of them may have come to it after any look at what it has
    assert 0 < metric(cluster, "gateway_resubmissions_total", stopped) - resubmitted <= once
    stopped.resume()
    wait_back(cluster, stopped)
    Burst(versions, num_tokens=5).check()


def test_the_only_sampler_is_stopped_and_goes_on_with_what_it_had(
    cluster: Cluster, versions: Versions, undisturbed: Callable[[], None]
) -> None:
    cluster.samplers[1].kill()
    only = cluster.samplers[0]
    undisturbed()
    burst = Burst(versions)
    wait_busy(cluster, only)
    resubmitted = metric(cluster, "gateway_resubmissions_total", only)
    only.pause()
    wait_until(lambda: state(cluster, only) == "silent", what="it is out", limit_s=OUT_LIMIT_S)
    only.resume()
    burst.check()
    assert metric(cluster, "gateway_resubmissions_total", only) == resubmitted


def test_a_stream_goes_on_when_its_sampler_is_killed(cluster: Cluster) -> None:
    wait_back(cluster, *cluster.samplers)
    body = {"model": BASE_MODEL, "prompt": random_tokens(20, 3), "n": 16, "max_tokens": 500, "seed": 11, "stream": True}

    def streamed(*, kill: bool) -> tuple[dict[int, list[int]], bool]:
        """Tokens of each choice, and whether a sampler was killed: it may be done before the first tokens are read."""
        tokens: dict[int, list[int]] = {n: [] for n in range(16)}
        url, killed = f"{cluster.url}/v1/completions", False
        asked = body | {"return_token_ids": True}
        with httpx.stream("POST", url, json=asked, timeout=60, trust_env=False) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens[choice["index"]] += choice["token_ids"]
                if kill and not killed and any(tokens.values()):
                    for busy in cluster.samplers:
                        if metric(cluster, "gateway_sampler_sequences", busy):
                            busy.kill()
                            killed = True
                            break  # the other one may have taken over already
        return tokens, killed

    expected, _ = streamed(kill=False)
    for _ in range(5):
        tokens, killed = streamed(kill=True)
        assert tokens == expected
        if killed:
            return
    raise AssertionError("in five streams no sampler had sequences in work when the first tokens were read")
