"""Versions of all parameters: the same engine, the same batch, another forward pass."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest_asyncio
import torch

from sampler_service.core.request import Result
from sampler_service.torch_engine.engine import TorchEngine
from tests.unit.sampler_service.full_versions import make_full, save
from tests.unit.sampler_service.serving import generate, make_adapter, plain_logits, prompt, serving
from tinsmith.modeling.full_weights import FullWeights


@pytest_asyncio.fixture
async def engine(model_folder: Path) -> AsyncIterator[TorchEngine]:
    async with serving(model_folder, prefill_tokens_per_step=16) as engine:
        yield engine


async def install(engine: TorchEngine, version_id: str, *, seed: int) -> FullWeights:
    """Returns a copy: the engine takes over what it gets."""
    weights = make_full(engine.base, seed=seed)
    kept = weights.like(weights.flat.clone())
    await engine.install(version_id, weights)
    return kept


def scores(result: Result) -> np.ndarray:
    """Logprobs of the prompt's tokens without the first, which has none."""
    assert result.prompt.logprobs is not None
    return result.prompt.logprobs[1:]


async def test_a_full_version_scores_like_plain_transformers_with_its_weights(
    engine: TorchEngine, tmp_path: Path
) -> None:
    weights = await install(engine, "v1", seed=1)
    folder = save(weights, tmp_path / "v1")
    tokens = prompt(40)
    for _ in range(2):  # the second time from the prefix cache
        result = await generate(engine, tokens, version_id="v1", max_tokens=1, prompt_logprobs=True)
        table = plain_logits(folder, tokens.tolist()).log_softmax(-1)
        expected = table[:-1].gather(1, torch.tensor(tokens[1:])[:, None].long())[:, 0]
        np.testing.assert_allclose(scores(result), expected.numpy(), atol=2e-5)


async def test_requests_of_all_kinds_of_versions_in_one_batch_equal_each_alone(engine: TorchEngine) -> None:
    for seed in (1, 2):
        await install(engine, f"v{seed}", seed=seed)
    await engine.install("lora", make_adapter(engine.targets, seed=3))
    versions = ["", "v1", "lora", "v2", "v1", ""]

    async def run(n: int) -> Result:
        # Prompts are longer than a step's share, and outputs of different lengths leave lanes to be filled.
        return await generate(
            engine,
            prompt(20 + 3 * n, seed=n),
            version_id=versions[n],
            max_tokens=8 + 5 * n,
            seed=n,
            num_samples=2,
            prompt_logprobs=True,
            topk_sample_logprobs=2,
        )

    alone = [await run(n) for n in range(len(versions))]
    engine.scheduler.kv.prefixes.clear()
    together = await asyncio.gather(*(run(n) for n in range(len(versions))))
    for one, other in zip(alone, together, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        np.testing.assert_allclose(
            [s.logprobs for s in one.sequences], [s.logprobs for s in other.sequences], atol=2e-5
        )
        np.testing.assert_allclose(scores(one), scores(other), atol=2e-5)


async def test_versions_of_one_prompt_share_no_prefix(engine: TorchEngine) -> None:
    await install(engine, "v1", seed=1)
    await install(engine, "v2", seed=2)
    tokens = prompt(64)
    seen = {}
    for version in ("", "v1", "v2"):
        result = await generate(engine, tokens, version_id=version, max_tokens=12, seed=1)
        assert result.prompt_cache_hit_tokens == 0
        (seen[version],) = result.sequences
    assert len({tuple(sequence.tokens) for sequence in seen.values()}) == 3
    for version, sequence in seen.items():
        result = await generate(engine, tokens, version_id=version, max_tokens=12, seed=1)
        assert result.prompt_cache_hit_tokens > 0
        assert result.sequences[0].tokens == sequence.tokens
        np.testing.assert_allclose(result.sequences[0].logprobs, sequence.logprobs, atol=1e-5)


async def test_an_older_version_stays_bit_for_bit_when_a_newer_one_comes(engine: TorchEngine) -> None:
    await install(engine, "v1", seed=1)
    engine.scheduler.kv.prefixes.clear()
    before = await generate(engine, prompt(30), version_id="v1", max_tokens=1, prompt_logprobs=True)
    await install(engine, "v2", seed=2)
    await generate(engine, prompt(30), version_id="v2", max_tokens=1)
    after = await generate(engine, prompt(30), version_id="v1", max_tokens=1, prompt_logprobs=True)
    assert np.array_equal(scores(before), scores(after))


async def test_the_least_recently_used_full_version_makes_room_and_the_base_model_is_what_it_was(
    model_folder: Path,
) -> None:
    async with serving(model_folder) as engine:
        size = make_full(engine.base, seed=0).num_bytes
    async with serving(model_folder, adapter_memory_bytes=2 * size) as engine:
        base = await generate(engine, prompt(9), max_tokens=8, seed=1)
        for seed in (1, 2, 3):
            await install(engine, f"v{seed}", seed=seed)
            await generate(engine, prompt(9), version_id=f"v{seed}", max_tokens=2)
        assert [version.version_id for version in engine.store.versions()] == ["v2", "v3"]
        for seed in (2, 3):
            engine.store.remove(f"v{seed}")
        assert (await generate(engine, prompt(9), max_tokens=8, seed=1)).sequences == base.sequences
        assert engine._runner.parameters._current is None, "a version that is gone holds no memory"
