"""Samplers while their model is trained: those that follow the run, and those that stand still."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import tinker
import torch
from openai.types import CompletionChoice
from tinker import ModelInput, SamplingParams

from tests.integration.conftest import KEY
from tests.support.examples import (
    BASE_MODEL,
    PROMPT,
    batch,
    forward,
    new_model,
    random_tokens,
    sample,
    score,
    train,
)
from tests.support.stack import Stack
from tests.support.switching import plain_model, switching_logprobs
from tests.support.waiting import wait_until
from tests.support.wire import Wire, next_token_datum
from tinsmith.rpc.paths import is_newer, run_of, version_number
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc

FAST = tinker.AdamParams(learning_rate=1e-2)
NUM_SAMPLES = 4
LENGTH = 300
TRIES = 5

Spans = list[tuple[str, int]]


def seq_id_of(version_id: str) -> int:
    return version_number(version_id, run_id=run_of(version_id), field="version_id")


def running(stack: Stack, wire: Wire) -> float:
    return wire.metrics(stack.metrics_url("sampler"))["sampler_running_sequences"]


def step_and_save(client: tinker.TrainingClient) -> tinker.SamplingClient:
    train(client, batch(11), steps=2, adam=FAST)
    return client.save_weights_and_get_sampling_client(kind="inflight").result()


def until_mixed(draw: Callable[[], tuple[Any, Spans]], *, num_versions: int) -> tuple[Any, Spans]:
    """A draw during which the model was saved; drawn again when a busy machine gave it too little time."""
    seen = []
    for _ in range(TRIES):
        drawn, spans = draw()
        if len(spans) >= num_versions:
            return drawn, spans
        seen.append(spans)
    raise AssertionError(f"no sample saw {num_versions} versions: {seen}")


def check_spans(stack: Stack, toy: Path, tokens: Sequence[int], logprobs: Sequence[float], spans: Spans) -> None:
    """Each token's logprob is that of its version, given the keys and values that earlier versions have left."""
    assert sum(count for _, count in spans) == len(tokens)
    last = 40  # tokens of the last span; a longer proof takes time only
    spans = [*spans[:-1], (spans[-1][0], min(last, spans[-1][1]))]
    count = sum(count for _, count in spans)
    models = {}
    for name, _ in spans:
        models[name] = plain_model(toy, stack.checkpoints / run_of(name) / "ephemeral" / str(seq_id_of(name)))
    torch.set_num_threads(1)
    expected = switching_logprobs(models, PROMPT, tokens[:count], spans)
    np.testing.assert_allclose(logprobs[:count], expected, atol=5e-4)
    pure = switching_logprobs(models, PROMPT, tokens[:count], [(spans[-1][0], count)])
    assert np.abs(pure - logprobs[:count]).max() > 0.05


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_long_sample_goes_on_with_each_new_version_and_names_them(
    service: tinker.ServiceClient, stack: Stack, wire: Wire, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronous RL in small: the sampler draws while the trainer steps and saves."""
    # Polled for one by one, an answer is kept after the SDK has it: what the SDK passes over is still in it.
    alone = service.holder.get_client_config().model_copy(update={"sample_use_retrieve_futures": False})
    monkeypatch.setattr(service.holder, "_client_config", alone)
    client = new_model(service, seed=11)
    sampler = client.save_weights_and_get_sampling_client(kind="inflight").result()

    def draw() -> tuple[tinker.SampledSequence, Spans]:
        params = SamplingParams(max_tokens=LENGTH, stop=[])
        future = sampler.sample(ModelInput.from_ints(PROMPT), NUM_SAMPLES, params)
        wait_until(lambda: running(stack, wire) or future.future().done(), what="the sample runs")
        for _ in range(2):
            step_and_save(client)
        result = future.result()
        request_id = result.sequences[0].sequence_id.rpartition(":")[0]
        raw = sampler_pb2.SampleResponse.FromString(wire.sampled(request_id).SerializeToString())
        spans = [[(span.version_id, span.num_tokens) for span in one.version_spans] for one in raw.sequences]
        assert [list(np.frombuffer(one.tokens, "<i4")) for one in raw.sequences] == [s.tokens for s in result.sequences]
        assert all(one == spans[0] for one in spans)  # they were in the same steps
        return result.sequences[0], spans[0]

    sequence, spans = until_mixed(draw, num_versions=3)
    numbers = [seq_id_of(name) for name, _ in spans]
    assert numbers == sorted(set(numbers))
    assert sequence.logprobs is not None
    check_spans(stack, toy, sequence.tokens, sequence.logprobs, spans)


def test_the_openai_endpoint_names_the_versions_in_its_last_chunk(stack: Stack, wire: Wire) -> None:
    model_id = wire.model(wire.session(), base_model=BASE_MODEL, rank=8, seed=12)
    data = [next_token_datum(random_tokens(20, 1), weights=[1.0] * 19)]
    seq_ids = itertools.count(1)

    def save() -> str:
        body = {"model_id": model_id, "seq_id": next(seq_ids), "kind": "inflight"}
        request_id = wire.request_id(wire.post("save_weights_for_sampler", **body, path=f"v{body['seq_id']}"))
        return wire.json_result(request_id)["path"]

    path = save()

    def draw() -> tuple[list[CompletionChoice], Spans]:
        with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="tml-test", max_retries=0, timeout=60) as http:
            chunks = http.completions.create(model=path, prompt=PROMPT, max_tokens=LENGTH, logprobs=2, stream=True)
            choices = [next(chunks).choices[0]]
            wire.output(wire.forward_backward(model_id, next(seq_ids), data))
            wire.json_result(wire.optim_step(model_id, next(seq_ids), learning_rate=1e-2))
            save()
            choices += [chunk.choices[0] for chunk in chunks]
        assert not any(hasattr(choice, "tinsmith") for choice in choices[:-1])
        spans = choices[-1].tinsmith["version_spans"]  # type: ignore[attr-defined]
        return choices, [(span["version"], span["num_tokens"]) for span in spans]

    choices, spans = until_mixed(draw, num_versions=2)
    first, second = (name for name, _ in spans)
    assert run_of(first) == model_id
    assert is_newer(second, first, run_id=model_id)
    listed = [choice.logprobs for choice in choices if choice.logprobs is not None]
    assert sum(count for _, count in spans) == sum(len(one.tokens or ()) for one in listed)
    assert len([one for one in listed if one.tokens]) > 1
    for one in listed:  # each table is with its token
        assert one.top_logprobs is not None
        assert [len(top) >= 2 for top in one.top_logprobs] == [True] * len(one.tokens or ())


def test_no_optimizer_step_and_no_eviction_changes_a_bit_of_a_snapshot(second_stack: Stack) -> None:
    prompts = [random_tokens(length, length) for length in (3, 40, 300)]
    with (
        tinker.ServiceClient(base_url=second_stack.base_url, api_key=KEY) as service,
        grpc.insecure_channel(second_stack.samplers[0]) as channel,
    ):
        client = new_model(service)

        def resident() -> list[str]:
            stub, request = sampler_pb2_grpc.SamplerServiceStub(channel), sampler_pb2.ListVersionsRequest()
            versions = stub.ListVersions(request, metadata=[("x-api-key", KEY)]).versions
            return [one.version_id for one in versions if run_of(one.version_id) == client.model_id]

        train(client, batch(1), steps=1, adam=FAST)
        sampler = client.save_weights_and_get_sampling_client().result()
        (version_id,) = resident()
        before = [score(sampler, tokens) for tokens in prompts]
        drawn = sample(sampler, PROMPT, seed=1, max_tokens=50)[0]

        train(client, batch(1), steps=10, adam=FAST)
        for tokens, scores in zip(prompts, before, strict=True):
            np.testing.assert_array_equal(score(sampler, tokens), scores)

        for _ in range(4):  # the sampler has memory for four versions
            newer = client.save_weights_and_get_sampling_client().result()
            assert np.abs(score(newer, prompts[1]) - before[1]).max() > 0.01
        assert version_id not in resident()
        for tokens, scores in zip(prompts, before, strict=True):
            np.testing.assert_array_equal(score(sampler, tokens), scores)
        again = sample(sampler, PROMPT, seed=1, max_tokens=50)[0]
        assert (again.tokens, again.logprobs) == (drawn.tokens, drawn.logprobs)


def draw_much(service: tinker.ServiceClient, client: tinker.TrainingClient) -> None:
    samplers = [client.save_weights_and_get_sampling_client(kind=kind).result() for kind in ("snapshot", "inflight")]
    samplers.append(service.create_sampling_client(base_model=BASE_MODEL).result())
    params = SamplingParams(max_tokens=60, stop=[])
    for future in [one.sample(ModelInput.from_ints(PROMPT), 16, params) for one in samplers for _ in range(4)]:
        future.result()


def test_no_sampling_changes_a_bit_of_what_the_trainer_computes(service: tinker.ServiceClient) -> None:
    client = new_model(service, seed=13)
    train(client, batch(2), steps=3, adam=FAST)
    sequences = [random_tokens(length, length) for length in (5, 64, 200)]
    before = forward(client, *sequences)
    draw_much(service, client)
    for one, other in zip(forward(client, *sequences), before, strict=True):
        np.testing.assert_array_equal(one, other)
