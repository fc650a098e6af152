"""Waiting for answers, giving them up, and samplers that several clients share."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import tinker
from tinker import ModelInput, SamplingParams

from tests.support.examples import BASE_MODEL, PROMPT, batch, new_model, random_tokens, sample, score, train
from tests.support.stack import Stack
from tests.support.waiting import wait_until
from tests.support.wire import Wire, next_token_datum

MAX_TOKENS = 1900
LONG = SamplingParams(max_tokens=MAX_TOKENS, stop=[])


@pytest.fixture(scope="module")
def base_sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result()


@pytest.fixture
def each_for_itself(service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are polled for one by one, as by SDKs that know no other way."""
    config = service.holder.get_client_config()
    alone = config.model_copy(update={"sample_use_retrieve_futures": False})
    monkeypatch.setattr(service.holder, "_client_config", alone)


def test_the_sdk_waits_for_many_samples_with_one_poll(
    stack: Stack, wire: Wire, base_sampler: tinker.SamplingClient
) -> None:
    assert base_sampler.holder.get_client_config().sample_use_retrieve_futures
    url = stack.metrics_url("gateway")
    polls = 'gateway_requests_total{method="POST",route="retrieve_future",status="200"}'
    before = wire.metrics(url).get(polls, 0)
    params = [SamplingParams(max_tokens=8, seed=seed, stop=[]) for seed in range(20)]
    pending = [base_sampler.sample(ModelInput.from_ints(PROMPT), 1, each) for each in params]
    tokens = [future.result().sequences[0].tokens for future in pending]
    assert all(len(each) == 8 for each in tokens)
    assert wire.metrics(url)[polls] - before == 20  # one for each payload


@pytest.mark.usefixtures("each_for_itself")
def test_samples_can_be_polled_for_one_by_one(
    service: tinker.ServiceClient, base_sampler: tinker.SamplingClient
) -> None:
    alone = service.create_sampling_client(base_model=BASE_MODEL).result()
    assert sample(alone, PROMPT, seed=1)[0].tokens == sample(base_sampler, PROMPT, seed=1)[0].tokens


@pytest.mark.usefixtures("each_for_itself")
def test_a_large_answer_comes_after_its_size(service: tinker.ServiceClient) -> None:
    alone = service.create_sampling_client(base_model=BASE_MODEL).result()
    tokens = random_tokens(1100, 5)
    params = SamplingParams(max_tokens=1, stop=[])
    result = alone.sample(ModelInput.from_ints(tokens), 1, params, topk_prompt_logprobs=128).result()
    assert result.topk_prompt_logprobs is not None
    assert [len(row or []) for row in result.topk_prompt_logprobs] == [0] + [128] * 1099


def test_an_abandoned_sample_stops_at_once(stack: Stack, wire: Wire, base_sampler: tinker.SamplingClient) -> None:
    url = stack.metrics_url("sampler")

    def num_running() -> float:
        return wire.metrics(url)["sampler_running_sequences"]

    wait_until(lambda: num_running() == 0, what="nothing runs")
    sampled = wire.metrics(url)["sampler_sampled_tokens_total"]
    future = base_sampler.sample(ModelInput.from_ints(PROMPT), 8, LONG)
    wait_until(lambda: num_running() == 8, what="8 sequences run")
    future.future().cancel()
    wait_until(lambda: num_running() == 0, what="nothing runs", limit_s=3.0)
    assert wire.metrics(url)["sampler_sampled_tokens_total"] - sampled < 8 * MAX_TOKENS
    assert len(sample(base_sampler, PROMPT)[0].tokens) == 12


def test_clients_that_join_a_sampling_session_get_numbers_of_their_own(base_sampler: tinker.SamplingClient) -> None:
    handle = base_sampler.get_sampler_handle()
    copies: list[tinker.SamplingClient] = [pickle.loads(pickle.dumps(base_sampler)) for _ in range(2)]
    copies += [tinker.SamplingClient.from_sampler_handle(handle, api_key="tml-test") for _ in range(2)]
    try:
        drawn = [sample(copy, PROMPT, seed=4)[0] for copy in copies]
        assert {tuple(each.tokens) for each in drawn} == {tuple(sample(base_sampler, PROMPT, seed=4)[0].tokens)}
        assert len({each.sequence_id for each in drawn}) == 4
        numbers = {int((each.sequence_id or "").split(":")[-2]) // 10**9 for each in drawn}
        assert len(numbers) == 4
        assert min(numbers) >= 1
    finally:
        for copy in copies:
            copy.holder.close()


def test_inflight_samplers_follow_their_run_and_snapshots_do_not(service: tinker.ServiceClient) -> None:
    client = new_model(service, seed=6)
    first = client.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshot = client.save_weights_and_get_sampling_client().result()
    before = score(first, PROMPT)
    np.testing.assert_allclose(score(snapshot, PROMPT), before, atol=1e-5)
    train(client, batch(6), steps=3)
    second = client.save_weights_and_get_sampling_client(kind="inflight").result()
    after = score(second, PROMPT)
    assert np.abs(after - before).max() > 1e-2
    np.testing.assert_allclose(score(first, PROMPT), after, atol=1e-5)
    np.testing.assert_allclose(score(snapshot, PROMPT), before, atol=1e-5)
    train(client, batch(6), steps=3)
    newest = client.save_weights_and_get_sampling_client(kind="inflight").result()
    for sampler in (first, second):
        np.testing.assert_allclose(score(sampler, PROMPT), score(newest, PROMPT), atol=1e-5)
    assert np.abs(score(newest, PROMPT) - after).max() > 1e-2


def test_a_future_says_which_operation_it_waits_for(wire: Wire) -> None:
    model_id = wire.model(wire.session(), base_model=BASE_MODEL)
    data = [next_token_datum(random_tokens(9, 0), weights=[1.0] * 8)]
    early = wire.forward_backward(model_id, 2, data)
    waiting = wire.poll(early).json()
    assert "seq_id 1" in waiting["queue_state_reason"]
    wire.output(wire.forward_backward(model_id, 1, data))
    wire.output(early)


def test_a_sample_says_that_it_is_computed(wire: Wire) -> None:
    body = {"session_id": wire.session(), "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler_id = wire.post("create_sampling_session", **body).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    params = {"max_tokens": MAX_TOKENS, "stop": []}
    request_id = wire.request_id(
        wire.post(
            "asample",
            sampling_session_id=sampler_id,
            seq_id=0,
            num_samples=32,
            prompt=prompt,
            sampling_params=params,
        )
    )
    waiting = wire.poll(request_id).json()
    assert (waiting["type"], waiting["queue_state"]) == ("try_again", "active")
    assert waiting["queue_state_reason"] != "the sampler is working on the request"
    assert wire.post("cancel_future", request_id=request_id).json() == {}
    assert "cancelled" in wire.poll(request_id).json()["error"]
