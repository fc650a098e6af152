"""The prefix cache of models with recurrent layers: a request that begins from states at a block border gives what it
gives without the cache, and states stay within their part of the cache's memory."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sampler_service.config import SamplerConfig
from sampler_service.core.request import Request, Result, Targets
from sampler_service.core.sizing import Sizes
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.torch_engine.kv_cache import BLOCK_TOKENS
from tests.support.parameters import fast_ones
from tests.unit.sampler_service.serving import generate, make_adapter, metric, prompt, serving
from tests.unit.sampler_service.serving import request as ask
from tests.unit.sampler_service.test_recurrent import family_folder

B = BLOCK_TOKENS
FAMILIES = ("Qwen3_5Text", "Qwen3Next", "KimiLinear", "NemotronH", "Mamba2", "Jamba", "Mamba", "Lfm2", "MiniMax")
"""Gated DeltaNet, KDA, Mamba2 with attention and without, Mamba with attention and without, short convolutions,
lightning attention."""

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


def tokens_of(length: int, seed: int = 0) -> Any:
    return prompt(length, seed=seed, vocab_size=256)


def joined(*parts: Any) -> Any:
    return np.concatenate(parts).astype(np.int32)


def agree(one: Result, other: Result) -> None:
    assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
    for left, right in zip(one.sequences, other.sequences, strict=True):
        np.testing.assert_allclose(left.logprobs, right.logprobs, rtol=1e-5, atol=1e-5)
    assert (one.prompt.logprobs is None) == (other.prompt.logprobs is None)
    if one.prompt.logprobs is not None and other.prompt.logprobs is not None:
        np.testing.assert_allclose(one.prompt.logprobs, other.prompt.logprobs, rtol=1e-5, atol=1e-5)


async def together(engine: TorchEngine, *asked: Request) -> list[Result]:
    return await asyncio.gather(*[generation.result() for generation in [await engine.submit(one) for one in asked]])


async def without_cache(folder: Path, *asked: Request) -> list[Result]:
    """One after the other."""
    async with serving(folder, prefix_cache_bytes=0) as engine:
        return [(await together(engine, one))[0] for one in asked]


def hits(*results: Result) -> list[int]:
    return [result.prompt_cache_hit_tokens for result in results]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return family_folder(tmp_path, "Qwen3_5Text")


@pytest.mark.parametrize("family", fast_ones(FAMILIES, ["Qwen3_5Text", "KimiLinear", "NemotronH", "Lfm2"]))
async def test_a_prompt_again_its_next_turn_and_its_beginning_give_what_they_give_without_a_cache(
    family: str, tmp_path: Path
) -> None:
    """Outputs of the first family reach into another block, whose states are not kept."""
    folder = family_folder(tmp_path, family)
    lengths, max_tokens = ([B, B + 1, 2 * B, 3 * B + 5], B) if family == FAMILIES[0] else ([B + 1, 3 * B + 5], 4)
    asked = [ask(tokens_of(n, n), max_tokens=max_tokens, num_samples=2, seed=n, temperature=0.8) for n in lengths]
    expected = await without_cache(folder, *asked)
    turns = [
        ask(joined(one.prompt, result.sequences[1].tokens, tokens_of(5)), max_tokens=5, seed=1)
        for one, result in zip(asked, expected, strict=True)
    ]
    expected_turns = await without_cache(folder, *turns)
    async with serving(folder) as engine:
        for one, turn, wanted, wanted_turn in zip(asked, turns, expected, expected_turns, strict=True):
            first = (await together(engine, one))[0]
            before = metric(engine, "prefilled_tokens_total")
            again = (await together(engine, one))[0]
            spared = len(one.prompt) - (metric(engine, "prefilled_tokens_total") - before)
            next_turn = (await together(engine, turn))[0]
            border = (len(one.prompt) - 1) // B * B
            assert hits(first, again, next_turn) == [0, border, border]
            assert spared == border
            agree(first, wanted)
            agree(again, wanted)
            agree(next_turn, wanted_turn)
        assert metric(engine, "prefix_cache_hits_total") == 2 * sum(n > B for n in lengths)


async def test_a_beginning_that_requests_share_is_spared_from_the_third_on(folder: Path) -> None:
    """The first leaves keys and values there, the second finds them and leaves the states."""
    shared = tokens_of(3 * B + 7)
    asked = [ask(joined(shared, tokens_of(2 * B, n)), max_tokens=5, seed=n) for n in range(1, 5)]
    expected = await without_cache(folder, *asked)
    async with serving(folder) as engine:
        results = [(await together(engine, one))[0] for one in asked]
    assert hits(*results) == [0, 0, 3 * B, 3 * B]
    for one, other in zip(results, expected, strict=True):
        agree(one, other)


@pytest.mark.parametrize(
    ("fields", "hit"),
    [
        ({"prompt_logprobs": True}, 0),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, 2 * B),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": B + 8}, 0),
        ({"targets": Targets(np.array([40, 49]), np.array([7, 8]))}, 2 * B),
        ({"topk_sample_logprobs": 4}, 3 * B),
    ],
    ids=str,
)
async def test_scored_tokens_are_computed(folder: Path, fields: dict[str, Any], hit: int) -> None:
    """There are states at 2 and 3 blocks."""
    one = ask(tokens_of(3 * B + 2), max_tokens=3, seed=2, **fields)
    (expected,) = await without_cache(folder, one)
    async with serving(folder, prefill_tokens_per_step=7) as engine:
        for length in (2 * B + 1, 3 * B + 1):
            await generate(engine, one.prompt[:length], max_tokens=1)
        (result,) = await together(engine, one)
    assert hits(result) == [hit]
    agree(result, expected)


async def test_another_version_another_salt_and_a_name_that_comes_back_find_nothing(folder: Path) -> None:
    tokens, how = tokens_of(2 * B + 3), {"max_tokens": 6, "seed": 1}
    async with serving(folder) as engine:
        fresh = {name: make_adapter(engine.targets, seed=n) for n, name in enumerate("abc")}
        for name in "ab":
            await engine.install(name, fresh[name])
        asked = [ask(tokens, version_id=name, **how) for name in ("", "a", "b")]
        first = [(await together(engine, one))[0] for one in asked]
        again = await together(engine, *asked)
        assert hits(*first, *again) == [0, 0, 0, 2 * B, 2 * B, 2 * B]
        for one, other in zip(first, again, strict=True):
            agree(one, other)
        assert hits(await generate(engine, tokens, cache_salt="ada", **how)) == [0]
        held = engine.scheduler.kv.prefixes.num_bytes
        engine.store.remove("a")
        await engine.install("a", fresh["c"])
        other = await generate(engine, tokens, version_id="a", **how)
        assert hits(other) == [0]
        assert engine.scheduler.kv.prefixes.num_bytes == held  # in the place of the old version's
    async with serving(folder, prefix_cache_bytes=0) as engine:
        await engine.install("c", fresh["c"])
        agree(other, await generate(engine, tokens, version_id="c", **how))


@pytest.mark.parametrize("family", fast_ones(["Qwen3_5Text", "NemotronH", "Jamba", "Lfm2"], ["NemotronH"]))
async def test_requests_at_once_in_pieces_do_not_disturb_each_other(family: str, tmp_path: Path) -> None:
    folder = family_folder(tmp_path, family)
    shared = tokens_of(2 * B)
    asked = [
        ask(joined(shared, tokens_of(1 + n % 3, n)), num_samples=1 + n % 2, max_tokens=12, seed=n) for n in range(6)
    ]
    expected = await without_cache(folder, *asked)
    for tokens_per_step in (11, 512):
        async with serving(folder, prefill_tokens_per_step=tokens_per_step) as engine:
            for _ in range(2):
                results = await together(engine, *asked)
                for one, other in zip(results, expected, strict=True):
                    agree(one, other)
            assert hits(*results) == [2 * B] * 6


async def test_a_cache_for_three_states_evicts_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [ask(tokens_of(B * (n % 3) + 20, n % 5), max_tokens=B, num_samples=2, seed=n) for n in range(15)]
    expected = await without_cache(folder, *asked)
    async with serving(folder) as engine:
        lane_bytes = Sizes.of(engine.base, SamplerConfig(base_model=str(folder))).bytes_per_lane
    limit = 2 * 3 * lane_bytes
    async with serving(folder, prefix_cache_bytes=limit) as engine:
        kv = engine.scheduler.kv
        held: list[int] = []
        observe = kv.observe

        def watch(**how: Any) -> None:
            planner = engine.scheduler.planner
            of_jobs = planner.partial.states if planner.partial is not None else {}
            held.append(len(kv.prefixes._states) + len(of_jobs))
            observe(**how)

        monkeypatch.setattr(kv, "observe", watch)
        for _ in range(2):
            for one, other in zip(await together(engine, *asked), expected, strict=True):
                agree(one, other)
        for n in (1, 1, 4, 4, 6, 6):
            agree((await together(engine, asked[n]))[0], expected[n])
        assert 2 <= max(held) <= 3
        assert metric(engine, "prefix_cache_hits_total") >= 3
        assert metric(engine, "prefix_cache_bytes") <= limit == metric(engine, "prefix_cache_limit_bytes")


async def test_a_cache_without_room_for_a_state_is_off_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(folder, prefix_cache_bytes=4000) as engine:
        results = [await generate(engine, tokens_of(3 * B), max_tokens=2) for _ in range(2)]
        assert hits(*results) == [0, 0]
        assert not engine.scheduler.kv.prefixes.enabled
    assert "no prefix cache: half of prefix_cache_bytes (4000) is less than the states of one sequence" in caplog.text


async def test_a_sequence_that_gave_way_goes_on_from_its_prompts_states(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler_service.core.sequence.HEADROOM", 8)
    asked = [ask(tokens_of(20, n), seed=n) for n in range(3)]
    computed, results = [], []
    for cache_bytes in (0, 2**20):
        async with serving(folder, max_kv_tokens=120, prefix_cache_bytes=cache_bytes) as engine:
            before = metric(engine, "prefilled_tokens_total")
            results.append(await together(engine, *asked))
            assert metric(engine, "preemptions_total") > 0
            computed.append(metric(engine, "prefilled_tokens_total") - before)
    for one, other in zip(*results, strict=True):
        agree(one, other)
    assert computed[1] <= computed[0] - B
