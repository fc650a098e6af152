"""Every option of a sample through the SDK, held against stock transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import ModelInput, SamplingParams, TensorData
from transformers import AutoModelForCausalLM

from tests.support.examples import BASE_MODEL, batch, new_model, random_tokens, sample, score, train

PROMPT = random_tokens(40, 11)
MAX_TOPK = 128
"""The sampler's default max_topk_logprobs."""
BLOCK = 16
"""Tokens of a block of the prefix cache."""


@pytest.fixture(scope="module")
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result()


@pytest.fixture(scope="module")
def oracle(toy: Path) -> torch.Tensor:
    """Raw logprobs [P - 1, V] of the prompt: row i is about position i + 1."""
    return raw_logprobs(toy, PROMPT)[:-1]


def raw_logprobs(toy: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(str(toy), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def ask(sampler: tinker.SamplingClient, num_samples: int = 1, **options: object) -> tinker.SampleResponse:
    """Options of `sample`, and of SamplingParams."""
    params = {name: options.pop(name) for name in list(options) if name in SamplingParams.model_fields}
    settings = SamplingParams(**{"max_tokens": 1, "stop": [], "seed": 0, **params})  # type: ignore[arg-type]
    return sampler.sample(ModelInput.from_ints(PROMPT), num_samples, settings, **options).result()  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [1, MAX_TOPK])
def test_tables_of_the_prompt_and_of_the_sample_are_transformers_own(
    sampler: tinker.SamplingClient, oracle: torch.Tensor, toy: Path, k: int
) -> None:
    result = ask(sampler, topk_prompt_logprobs=k, topk_sample_logprobs=k, max_tokens=3, temperature=0.7)
    assert result.topk_prompt_logprobs is not None
    assert result.topk_prompt_logprobs[0] is None
    (sequence,) = result.sequences
    full = raw_logprobs(toy, [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 : -1]
    for rows, table in (
        (result.topk_prompt_logprobs[1:], oracle),
        (sequence.topk_logprobs or [], (full / 0.7).log_softmax(-1)),
    ):
        found = np.array(rows)  # [rows, k, (token, logprob)]
        values, _ = table.topk(k)
        assert found.shape == (len(table), k, 2)
        np.testing.assert_allclose(found[:, :, 1], values, atol=1e-4)
        ids = torch.tensor(found[:, :, 0], dtype=torch.int64)
        assert all(len(set(row)) == k for row in ids.tolist())
        np.testing.assert_allclose(table.gather(1, ids), values, atol=1e-4)  # near ties may change places


@pytest.mark.parametrize("option", ["topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"])
@pytest.mark.parametrize("k", [MAX_TOPK + 1, -1])
def test_a_table_that_is_too_wide_is_refused_by_name(sampler: tinker.SamplingClient, option: str, k: int) -> None:
    with pytest.raises((tinker.RequestFailedError, tinker.APIError, ValueError), match=f"{option}.*{k}"):
        ask(sampler, **{option: k})


def test_named_tokens_are_scored_dense_and_sparse(sampler: tinker.SamplingClient, oracle: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(oracle.shape[1], (len(PROMPT) - 1, 5), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.6] = -1
    ids[:30] = -1  # so that the scoring may begin late
    expected = torch.where(ids < 0, 0.0, oracle.gather(1, ids.clamp(min=0)))
    for targets in (TensorData.from_torch(ids), TensorData.from_torch_sparse(ids, pad_value=-1)):
        answer = ask(sampler, target_prompt_logprobs=targets).target_prompt_logprobs
        assert answer is not None
        assert answer.shape == targets.shape
        assert answer.sparse_crow_indices == targets.sparse_crow_indices
        assert answer.sparse_col_indices == targets.sparse_col_indices
        np.testing.assert_allclose(answer.to_numpy(), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(len(PROMPT), 1, dtype=torch.int64), "target_prompt_logprobs"),
        (torch.full((len(PROMPT) - 1, 1), -1), "names no token"),
        (torch.full((len(PROMPT) - 1, 1), 1 << 40), "target_prompt_logprobs: token id"),
        (torch.arange(-2, len(PROMPT) - 3)[:, None], "target_prompt_logprobs: token id -2"),
    ],
    ids=["rows", "nothing", "huge", "negative"],
)
def test_targets_that_fit_nothing_are_refused(sampler: tinker.SamplingClient, ids: torch.Tensor, message: str) -> None:
    with pytest.raises((tinker.RequestFailedError, tinker.APIError, ValueError), match=message):
        ask(sampler, target_prompt_logprobs=TensorData.from_torch(ids))


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_alternatives_are_draws_of_the_requests_temperature(
    sampler: tinker.SamplingClient, oracle: torch.Tensor, temperature: float
) -> None:
    alternatives = ask(sampler, prompt_alt_tokens_k=64, temperature=temperature).prompt_alt_tokens
    assert alternatives is not None
    tokens = torch.tensor(alternatives.tokens.to_numpy())
    assert tokens.shape == (len(PROMPT) - 1, 64)
    table = oracle if temperature == 0 else (oracle / temperature).log_softmax(-1)
    np.testing.assert_allclose(alternatives.logprobs.to_numpy(), table.gather(1, tokens), atol=1e-4)
    if temperature == 0:
        assert torch.equal(tokens, oracle.argmax(-1, keepdim=True).expand(-1, 64))
        return
    # The share of each row's best token is what its probability says; 39 rows x 64 draws: 5 deviations of the mean.
    best = table.argmax(-1, keepdim=True)
    p = table.gather(1, best).exp().double()
    deviation = (p * (1 - p)).sum().sqrt() / 64**0.5
    assert abs((tokens == best).double().mean(1).sum() - p.sum()) < 5 * deviation


@pytest.mark.parametrize("last_n", [1, 7, len(PROMPT) - 1])
def test_only_the_last_positions_are_scored_and_the_rest_comes_from_the_cache(
    sampler: tinker.SamplingClient, oracle: torch.Tensor, last_n: int
) -> None:
    ask(sampler)  # now the prompt is in the cache
    own = oracle.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    result = ask(sampler, include_prompt_logprobs=True, prompt_logprobs_last_n=last_n, topk_prompt_logprobs=2)
    assert result.prompt_logprobs is not None
    assert result.topk_prompt_logprobs is not None
    assert result.prompt_logprobs[:-last_n] == [None] * (len(PROMPT) - last_n)
    assert result.topk_prompt_logprobs[:-last_n] == [None] * (len(PROMPT) - last_n)
    np.testing.assert_allclose(np.array(result.prompt_logprobs[-last_n:], np.float32), own[-last_n:], atol=1e-4)
    values = oracle.topk(2).values[-last_n:]
    np.testing.assert_allclose(np.array(result.topk_prompt_logprobs[-last_n:])[:, :, 1], values, atol=1e-4)
    # The hidden state at one position scores the next.
    assert result.prompt_cache_hit_tokens == min(len(PROMPT) // BLOCK * BLOCK, len(PROMPT) - 1 - last_n)


def test_cached_prompts_and_next_turns_give_the_same_numbers(service: tinker.ServiceClient) -> None:
    client = new_model(service, seed=5)
    train(client, batch(1), steps=2)
    trained = client.save_weights_and_get_sampling_client().result()
    prompt, params = random_tokens(3 * BLOCK, 12), SamplingParams(max_tokens=2 * BLOCK, stop=[], seed=4)
    first, again = (trained.sample(ModelInput.from_ints(prompt), 2, params).result() for _ in range(2))
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, 3 * BLOCK - 1)
    for one, other in zip(first.sequences, again.sequences, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs_np, other.logprobs_np, atol=1e-5)
    longer = [*prompt, *first.sequences[0].tokens, *random_tokens(5, 13)]
    turn = trained.sample(ModelInput.from_ints(longer), 1, params).result()
    assert turn.prompt_cache_hit_tokens == 4 * BLOCK
    alone = score(trained, [*longer, *turn.sequences[0].tokens])[len(longer) - 1 :]
    np.testing.assert_allclose(turn.sequences[0].logprobs_np, alone, atol=1e-4)
    # New weights are another namespace.
    client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    fresh = client.save_weights_and_get_sampling_client().result()
    assert fresh.sample(ModelInput.from_ints(longer), 1, params).result().prompt_cache_hit_tokens == 0


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 5, -(2**70), 10**30])
def test_any_integer_is_a_seed(sampler: tinker.SamplingClient, seed: int) -> None:
    one, same, other = (
        [sequence.tokens for sequence in sample(sampler, PROMPT, num_samples=2, max_tokens=8, seed=value)]
        for value in (seed, seed, seed + 1)
    )
    assert one == same
    assert one[0] != one[1]
    assert one != other
