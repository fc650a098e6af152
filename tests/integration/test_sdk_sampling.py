"""Samples and scores through the SDK."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import ModelInput, SamplingParams, TensorData
from transformers import AutoTokenizer

from tests.support.examples import (
    BASE_MODEL,
    PROMPT,
    batch,
    new_model,
    next_token_datum,
    random_tokens,
    sample,
    score,
    train,
)


@pytest.fixture(scope="module")
def base_sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result()


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = new_model(service, seed=3)
    train(client, batch(0), steps=4)
    return client


def test_samples_are_reproducible_and_independent(base_sampler: tinker.SamplingClient) -> None:
    first = sample(base_sampler, PROMPT, num_samples=4, seed=1)
    assert len({tuple(sequence.tokens) for sequence in first}) == 4
    assert len({sequence.sequence_id for sequence in first}) == 4
    for sequence in first:
        assert len(sequence.tokens) == 12
        assert sequence.stop_reason == "length"
        assert sequence.logprobs is not None
        assert all(p < 0 for p in sequence.logprobs)
    again = sample(base_sampler, PROMPT, num_samples=4, seed=1)
    assert [sequence.tokens for sequence in again] == [sequence.tokens for sequence in first]
    assert [sequence.logprobs for sequence in again] == [sequence.logprobs for sequence in first]
    other = sample(base_sampler, PROMPT, num_samples=4, seed=-(2**70) - 2)  # any integer is a seed
    assert [sequence.tokens for sequence in other] != [sequence.tokens for sequence in first]
    assert sample(base_sampler, PROMPT)[0].tokens != sample(base_sampler, PROMPT)[0].tokens  # no seed


def test_greedy_takes_the_most_probable_token_in_each_way_to_say_so(base_sampler: tinker.SamplingClient) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    result = base_sampler.sample(ModelInput.from_ints(PROMPT), 1, params, topk_sample_logprobs=3).result()
    (greedy,) = result.sequences
    assert greedy.topk_logprobs is not None
    assert greedy.logprobs is not None
    for token, logprob, row in zip(greedy.tokens, greedy.logprobs, greedy.topk_logprobs, strict=True):
        assert row is not None
        assert len(row) == 3
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)
        assert row[0] == (token, pytest.approx(logprob, abs=1e-5))
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert sample(base_sampler, PROMPT, max_tokens=8, **params)[0].tokens == greedy.tokens


def test_top_k_and_top_p_limit_the_draw(base_sampler: tinker.SamplingClient) -> None:
    params = SamplingParams(max_tokens=1, stop=[], temperature=2.0)
    table = base_sampler.sample(ModelInput.from_ints(PROMPT), 1, params, topk_sample_logprobs=5).result()
    assert table.sequences[0].topk_logprobs is not None
    best = [token for token, _ in table.sequences[0].topk_logprobs[0] or []]
    top_p = math.exp(sum(p for _, p in (table.sequences[0].topk_logprobs[0] or [])[:1])) + 1e-6  # two tokens reach it
    for limits, allowed in (({"top_k": 3}, best[:3]), ({"top_p": top_p}, best[:2])):
        drawn = sample(base_sampler, PROMPT, num_samples=64, max_tokens=1, temperature=2.0, seed=0, **limits)
        assert {sequence.tokens[0] for sequence in drawn} == set(allowed)


def test_a_stop_is_included_and_ends_the_sequence(base_sampler: tinker.SamplingClient, toy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(toy))
    tokens = sample(base_sampler, PROMPT, seed=2, max_tokens=20)[0].tokens
    at = next(n for n in range(3, 20) if tokens[n] not in tokens[:n])
    by_id = sample(base_sampler, PROMPT, seed=2, max_tokens=20, stop=[tokens[at]])[0]
    assert (by_id.tokens, by_id.stop_reason) == (tokens[: at + 1], "stop")
    assert len(by_id.logprobs or []) == at + 1
    at = next(
        n
        for n in range(3, 20)
        if (text := tokenizer.decode(tokens[n])).strip() and text not in tokenizer.decode(tokens[:n])
    )
    text = tokenizer.decode(tokens[at])
    for stop in (text, ["never in there", text]):
        by_text = sample(base_sampler, PROMPT, seed=2, max_tokens=20, stop=stop)[0]
        assert (by_text.tokens, by_text.stop_reason) == (tokens[: at + 1], "stop")


def test_the_models_own_end_stops_unless_told_otherwise(service: tinker.ServiceClient, toy: Path) -> None:
    end = AutoTokenizer.from_pretrained(str(toy)).eos_token_id
    client = new_model(service)
    weights = np.zeros(len(PROMPT), np.float32)
    weights[-1] = 1.0
    train(
        client,
        [next_token_datum([*PROMPT, end], weights=weights)],
        steps=20,
        adam=tinker.AdamParams(learning_rate=3e-3),
    )
    sampler = client.save_weights_and_get_sampling_client().result()
    for stop in (None, "never drawn", ["never drawn"], [(end + 1) % 100]):  # a stop of one's own is added to the end
        (ended,) = sample(sampler, PROMPT, temperature=0.0, stop=stop)
        assert (ended.tokens, ended.stop_reason) == ([end], "stop"), stop
    (went_on,) = sample(sampler, PROMPT, temperature=0.0, stop=[])
    assert (went_on.tokens[0], len(went_on.tokens), went_on.stop_reason) == (end, 12, "length")


def test_prompts_are_scored_in_every_way(base_sampler: tinker.SamplingClient) -> None:
    prompt, params = ModelInput.from_ints(PROMPT), SamplingParams(max_tokens=1, stop=[], seed=0)
    count = len(PROMPT)
    ids = torch.full((count - 1, 2), -1, dtype=torch.int64)
    ids[:, 0] = torch.tensor(PROMPT[1:])
    ids[3, 1] = 17
    result = base_sampler.sample(
        prompt,
        1,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        target_prompt_logprobs=TensorData.from_torch(ids),
        prompt_alt_tokens_k=3,
    ).result()
    wanted = score(base_sampler, PROMPT)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    np.testing.assert_allclose(np.array(result.prompt_logprobs[1:], np.float32), wanted, atol=1e-5)

    assert result.topk_prompt_logprobs is not None
    assert len(result.topk_prompt_logprobs) == count
    assert result.topk_prompt_logprobs[0] is None
    tables = [dict(row or []) for row in result.topk_prompt_logprobs[1:]]
    assert all(len(table) == 4 for table in tables)
    for token, logprob, table in zip(PROMPT[1:], wanted, tables, strict=True):
        assert table.get(token, logprob) == pytest.approx(logprob, abs=1e-5)
        assert logprob <= max(table.values()) + 1e-5

    assert result.target_prompt_logprobs is not None
    scored = result.target_prompt_logprobs.to_numpy()
    np.testing.assert_allclose(scored[:, 0], wanted, atol=1e-5)
    assert scored[3, 1] < 0
    assert np.count_nonzero(scored[:, 1]) == 1
    sparse = TensorData.from_torch_sparse(torch.where(torch.eye(count - 1, 8) > 0, ids[:, :1], -1), pad_value=-1)
    assert sparse.sparse_crow_indices is not None
    by_sparse = base_sampler.sample(prompt, 1, params, target_prompt_logprobs=sparse).result().target_prompt_logprobs
    assert by_sparse is not None
    np.testing.assert_allclose(by_sparse.to_numpy().diagonal(), wanted[:8], atol=1e-5)

    assert result.prompt_alt_tokens is not None
    drawn, drawn_logprobs = result.prompt_alt_tokens.tokens.to_numpy(), result.prompt_alt_tokens.logprobs.to_numpy()
    assert drawn.shape == drawn_logprobs.shape == (count - 1, 3)
    assert len(np.unique(drawn)) > 3
    for tokens, values, table in zip(drawn, drawn_logprobs, tables, strict=True):
        for token, value in zip(tokens, values, strict=True):
            assert value == pytest.approx(table.get(token, value), abs=1e-5)

    last = base_sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3).result()
    assert last[:-3] == [None] * (count - 3)
    np.testing.assert_allclose(np.array(last[-3:], np.float32), wanted[-3:], atol=1e-5)


def test_a_temperature_scales_the_returned_logprobs(base_sampler: tinker.SamplingClient) -> None:
    params = SamplingParams(max_tokens=1, stop=[], seed=3, temperature=0.5)
    result = base_sampler.sample(ModelInput.from_ints(PROMPT), 1, params, topk_sample_logprobs=20).result()
    (hot,) = (
        base_sampler.sample(
            ModelInput.from_ints(PROMPT), 1, SamplingParams(max_tokens=1, stop=[]), topk_sample_logprobs=20
        )
        .result()
        .sequences
    )
    (cold,) = result.sequences
    assert hot.topk_logprobs is not None
    assert cold.topk_logprobs is not None
    raw, scaled = np.array(hot.topk_logprobs[0]), np.array(cold.topk_logprobs[0])
    np.testing.assert_array_equal(scaled[:, 0], raw[:, 0])
    np.testing.assert_allclose(np.diff(scaled[:, 1]), 2 * np.diff(raw[:, 1]), atol=1e-4)


def test_requests_that_share_a_batch_do_not_see_each_other(
    base_sampler: tinker.SamplingClient, trained: tinker.TrainingClient
) -> None:
    """They join and leave a running batch, and share it with other weights."""
    adapted = trained.save_weights_and_get_sampling_client().result()
    asked = [
        (
            client,
            ModelInput.from_ints(random_tokens(3 + 5 * n, n)),
            SamplingParams(max_tokens=3 + 4 * n, seed=n, stop=[]),
        )
        for n in range(4)
        for client in (base_sampler, adapted)
    ]
    pending = [client.sample(prompt, 2, params) for client, prompt, params in asked]
    for (client, prompt, _), result in zip(asked, pending, strict=True):
        for sequence in result.result().sequences:
            alone = score(client, [*prompt.to_ints(), *sequence.tokens])[prompt.length - 1 :]
            np.testing.assert_allclose(sequence.logprobs_np, alone, atol=1e-4)
