"""Prompt logprobs and their tables against a plain forward pass."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sampler_service.core.request import EMPTY_LOGPROB, Targets
from tests.support.models import make_model
from tests.unit.sampler_service.serving import generate, make_adapter, metric, plain_logits, prompt, serving


@pytest.fixture
def tokens() -> np.ndarray:
    return prompt(40)


@pytest.fixture
def table(model_folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Raw logprobs [39, V]: row i is about position i + 1."""
    return plain_logits(model_folder, tokens)[:-1].log_softmax(-1).numpy()


async def test_prompt_logprobs_are_raw_at_any_temperature(model_folder: Path, tokens, table) -> None:
    async with serving(model_folder) as engine:
        at_start = metric(engine, "prefilled_tokens_total")
        result = await generate(engine, tokens, max_tokens=1, prompt_logprobs=True, temperature=0.5)
        assert metric(engine, "prefilled_tokens_total") == at_start + 40
    assert np.isnan(result.prompt.logprobs[0])
    np.testing.assert_allclose(result.prompt.logprobs[1:], table[np.arange(39), tokens[1:]], atol=1e-4)
    assert result.prompt.topk is None


@pytest.mark.parametrize("last_n", [1, 15, 39])
async def test_only_the_last_n_positions_are_scored(model_folder: Path, tokens, table, last_n: int) -> None:
    async with serving(model_folder, prefill_tokens_per_step=9) as engine:
        result = await generate(
            engine, tokens, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=last_n, topk_prompt_logprobs=3
        )
    own = table[np.arange(39), tokens[1:]]
    assert np.isnan(result.prompt.logprobs[:-last_n]).all()
    np.testing.assert_allclose(result.prompt.logprobs[-last_n:], own[-last_n:], atol=1e-4)
    assert (result.prompt.topk.logprobs[:-last_n] == EMPTY_LOGPROB).all()
    assert (result.prompt.topk.logprobs[-last_n:] != EMPTY_LOGPROB).all()


async def test_topk_table_of_the_prompt(model_folder: Path, tokens, table) -> None:
    async with serving(model_folder) as engine:
        result = await generate(engine, tokens, max_tokens=1, topk_prompt_logprobs=7)
    values, ids = torch.tensor(table).topk(7)
    assert result.prompt.logprobs is None
    assert (result.prompt.topk.token_ids[0] == 0).all()
    assert (result.prompt.topk.logprobs[0] == EMPTY_LOGPROB).all()
    np.testing.assert_array_equal(result.prompt.topk.token_ids[1:], ids)
    np.testing.assert_allclose(result.prompt.topk.logprobs[1:], values, atol=1e-4)


async def test_named_cells_are_scored_and_minus_one_gives_zero(model_folder: Path, tokens, table) -> None:
    rows = np.array([0, 0, 3, 20, 38, 38, 38])
    named = np.array([5, -1, 500, 7, 0, -1, 511])
    async with serving(model_folder, prefill_tokens_per_step=8) as engine:
        result = await generate(engine, tokens, max_tokens=1, targets=Targets(rows, named))
    expected = np.where(named < 0, 0.0, table[rows, named])
    np.testing.assert_allclose(result.prompt.targets_M, expected, atol=1e-4)


async def test_alternatives_are_draws_at_the_requests_temperature(model_folder: Path, tokens, table) -> None:
    async with serving(model_folder) as engine:
        results = [
            await generate(engine, tokens, max_tokens=1, prompt_alt_tokens_k=6, temperature=t, seed=3)
            for t in (0.5, 0.5, 0.0)
        ]
    first, again, greedy = (result.prompt.alt_tokens for result in results)
    scaled = torch.tensor(table / 0.5).log_softmax(-1)
    np.testing.assert_allclose(first.logprobs, scaled.gather(-1, torch.tensor(first.tokens)), atol=1e-4)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != first.tokens[:, :1]).any()
    np.testing.assert_array_equal(greedy.tokens, np.repeat(table.argmax(-1)[:, None], 6, 1))


async def test_an_adapter_scores_with_its_own_weights(model_folder: Path, tokens, table) -> None:
    async with serving(model_folder) as engine:
        await engine.install("v", make_adapter(engine.targets, seed=1))
        result = await generate(engine, tokens, version_id="v", max_tokens=1, prompt_logprobs=True)
    assert np.abs(result.prompt.logprobs[1:] - table[np.arange(39), tokens[1:]]).max() > 0.1


async def test_a_prompt_of_one_token_has_nothing_to_score(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        result = await generate(engine, prompt(1), max_tokens=1, prompt_logprobs=True, prompt_alt_tokens_k=2)
    assert np.isnan(result.prompt.logprobs).all()
    assert result.prompt.alt_tokens.tokens.shape == (0, 2)


async def test_a_table_wider_than_the_vocabulary_ends_with_empty_cells(tmp_path: Path) -> None:
    folder, asked = make_model(tmp_path, vocab_size=100), prompt(5, vocab_size=100)
    async with serving(folder) as engine:
        result = await generate(
            engine, asked, max_tokens=2, topk_prompt_logprobs=128, topk_sample_logprobs=128, prompt_alt_tokens_k=128
        )
    sampled = result.sequences[0].topk
    assert result.prompt.topk.token_ids.shape == (5, 128)
    assert sampled.token_ids.shape == (2, 128)
    for rows in (slice(1, 5), slice(0, 2)):
        table = result.prompt.topk if rows.start else sampled
        assert (np.sort(table.token_ids[rows, :100]) == np.arange(100)).all()
        assert (table.token_ids[rows, 100:] == 0).all()
        assert (table.logprobs[rows, :100] > EMPTY_LOGPROB).all()
        assert (table.logprobs[rows, 100:] == EMPTY_LOGPROB).all()
    assert result.prompt.alt_tokens.tokens.max() < 100
