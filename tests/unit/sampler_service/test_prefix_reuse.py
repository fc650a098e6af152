"""Reuse of the prefix cache changes no number: the engine against itself with the cache switched off."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from sampler_service.core.request import Request, Result, Targets
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.torch_engine.kv_cache import BLOCK_TOKENS
from tests.unit.sampler_service.serving import generate, make_adapter, metric, prompt, serving
from tests.unit.sampler_service.serving import request as ask
from tinsmith.errors import ServiceError

B = BLOCK_TOKENS


@pytest.fixture(scope="module")
def sliding_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3: every layer but the last sees a window of 8 tokens."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.1,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    folder = tmp_path_factory.mktemp("sliding")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def agree(one: Result, other: Result) -> None:
    assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
    for left, right in zip(one.sequences, other.sequences, strict=True):
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=2e-5)


async def run(engine: TorchEngine, *asked: Request) -> list[Result]:
    """All at once."""
    return await asyncio.gather(*[generation.result() for generation in [await engine.submit(one) for one in asked]])


async def without_cache(folder: Path, *asked: Request) -> list[Result]:
    """One after the other."""
    async with serving(folder, prefix_cache_bytes=0) as engine:
        results = [(await run(engine, one))[0] for one in asked]
        again = (await run(engine, asked[0]))[0]
        assert metric(engine, "prefix_cache_lookups_total") == again.prompt_cache_hit_tokens == 0
    return results


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("model", "lengths"), [("model_folder", [1, B - 1, B, B + 1, 3 * B, 3 * B + 5]), ("sliding_folder", [B, 3 * B + 5])]
)
async def test_a_prompt_again_and_its_next_turn_give_what_they_give_without_a_cache(
    model: str, lengths: list[int], request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    asked = [ask(prompt(n, seed=n), max_tokens=B, num_samples=2, seed=n, temperature=0.8) for n in lengths]
    expected = await without_cache(folder, *asked)
    turns = [
        ask(np.concatenate([one.prompt, result.sequences[1].tokens, prompt(5)]).astype(np.int32), max_tokens=9, seed=1)
        for one, result in zip(asked, expected, strict=True)
    ]
    expected_turns = await without_cache(folder, *turns)
    async with serving(folder) as engine:
        at_start = metric(engine, "prefix_cache_lookups_total")
        for one, wanted in zip(asked, expected, strict=True):
            first = await _one(engine, one)
            before = metric(engine, "prefilled_tokens_total")
            again = await _one(engine, one)
            computed = metric(engine, "prefilled_tokens_total") - before
            length = len(one.prompt)
            assert first.prompt_cache_hit_tokens == 0
            assert again.prompt_cache_hit_tokens == min(length - 1, length // B * B)
            assert computed == length - again.prompt_cache_hit_tokens
            agree(first, wanted)
            agree(again, wanted)
        for one, turn, wanted in zip(asked, turns, expected_turns, strict=True):
            result = await _one(engine, turn)
            # The last token of an output is never computed.
            assert result.prompt_cache_hit_tokens == (len(one.prompt) + B - 1) // B * B
            agree(result, wanted)
        assert metric(engine, "prefix_cache_lookups_total") - at_start == 3 * len(lengths)
        assert metric(engine, "prefix_cache_hits_total") == sum(n >= B for n in lengths) + len(lengths)
        assert metric(engine, "prefix_cache_hit_tokens_total") > 0
        assert metric(engine, "prefix_cache_bytes") > 0


async def _one(engine: TorchEngine, one: Request) -> Result:
    return (await run(engine, one))[0]


@pytest.mark.parametrize(
    ("fields", "hit"),
    [
        ({"prompt_logprobs": True}, 0),
        ({"topk_prompt_logprobs": 3}, 0),
        ({"prompt_alt_tokens_k": 2}, 0),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 5, "topk_prompt_logprobs": 2}, 3 * B + 2 - 6),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": B + 8}, 2 * B - 7),
        ({"targets": Targets(np.array([1, 40, 49]), np.array([-1, 7, 8]))}, 40),
        ({"targets": Targets(np.array([0, 49]), np.array([3, 8]))}, 0),
        ({"topk_sample_logprobs": 4}, 3 * B),
    ],
    ids=str,
)
async def test_scored_tokens_are_computed_and_those_before_them_are_not(
    model_folder: Path, fields: dict[str, Any], hit: int
) -> None:
    one = ask(prompt(3 * B + 2), max_tokens=3, seed=2, **fields)
    (expected,) = await without_cache(model_folder, one)
    async with serving(model_folder, prefill_tokens_per_step=7) as engine:
        await generate(engine, one.prompt, max_tokens=1)
        result = await _one(engine, one)
    assert result.prompt_cache_hit_tokens == hit
    agree(result, expected)
    for name in ("logprobs", "targets_M"):
        left, right = getattr(result.prompt, name), getattr(expected.prompt, name)
        assert (left is None) == (right is None)
        if right is not None:
            np.testing.assert_allclose(left, right, atol=2e-5)
    for name in ("topk", "alt_tokens"):
        left, right = getattr(result.prompt, name), getattr(expected.prompt, name)
        assert (left is None) == (right is None)
        if right is not None:
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=2e-5)


async def test_each_version_has_its_own_and_it_goes_with_the_version(model_folder: Path) -> None:
    tokens, how = prompt(2 * B + 3), {"max_tokens": 6, "seed": 1}
    async with serving(model_folder) as engine:
        fresh = {name: make_adapter(engine.targets, seed=n) for n, name in enumerate("abc")}
        for name in "ab":
            await engine.install(name, fresh[name])
        first = [await generate(engine, tokens, version_id=name, **how) for name in ("", "a", "b")]
        assert [result.prompt_cache_hit_tokens for result in first] == [0, 0, 0]
        again = await run(engine, *[ask(tokens, version_id=name, **how) for name in ("", "a", "b")])
        assert [result.prompt_cache_hit_tokens for result in again] == [2 * B] * 3
        for one, other in zip(first, again, strict=True):
            agree(one, other)
        held = engine.scheduler.kv.prefixes.num_bytes
        engine.store.remove("a")
        engine.store.remove("b")
        await engine.install("a", fresh["c"])  # the name again, with other weights
        other = await generate(engine, tokens, version_id="a", **how)
        assert other.prompt_cache_hit_tokens == 0
        assert engine.scheduler.kv.prefixes.num_bytes == held // 3 * 2  # the base model's and its own
        engine.store.remove("a")
        assert (await generate(engine, tokens, **how)).prompt_cache_hit_tokens == 2 * B
        assert engine.scheduler.kv.prefixes.num_bytes == held // 3
    async with serving(model_folder, prefix_cache_bytes=0) as engine:
        await engine.install("c", fresh["c"])
        agree(other, await generate(engine, tokens, version_id="c", **how))


@pytest.mark.parametrize("version_id", ["", "a"])
async def test_a_prefix_sent_with_another_salt_is_not_found(model_folder: Path, version_id: str) -> None:
    tokens, how = prompt(2 * B + 3), {"version_id": version_id, "max_tokens": B + 2, "seed": 1}
    async with serving(model_folder) as engine:
        await engine.install("a", make_adapter(engine.targets, seed=0))
        first = await generate(engine, tokens, cache_salt="ada", **how)
        turn = np.concatenate([tokens, first.sequences[0].tokens]).astype(np.int32)
        for salt, hits in (("bob", [0, 2 * B]), ("", [0, 2 * B]), ("ada", [2 * B, 3 * B])):
            results = [await generate(engine, tokens[:-1], cache_salt=salt, **how)]
            results.append(await generate(engine, turn, cache_salt=salt, **how))
            assert [result.prompt_cache_hit_tokens for result in results] == hits
        short = prompt(B - 1, seed=3)  # its first full block ends in what is drawn
        drawn = await generate(engine, short, cache_salt="ada", **how)
        turn = np.concatenate([short, drawn.sequences[0].tokens]).astype(np.int32)
        for salt, hit in (("bob", 0), ("ada", 2 * B)):
            assert (await generate(engine, turn, cache_salt=salt, **how)).prompt_cache_hit_tokens == hit


async def test_equal_prompts_in_one_step_and_in_pieces_do_not_disturb_each_other(model_folder: Path) -> None:
    shared = prompt(2 * B)
    asked = [
        ask(np.concatenate([shared, prompt(n % 3, seed=n)]), num_samples=1 + n % 2, max_tokens=12, seed=n)
        for n in range(6)
    ]
    expected = await without_cache(model_folder, *asked)
    for tokens_per_step in (11, 512):
        async with serving(model_folder, prefill_tokens_per_step=tokens_per_step) as engine:
            for hits in (False, True):
                together = await run(engine, *asked)
                for one, other in zip(together, expected, strict=True):
                    agree(one, other)
                if hits:
                    assert all(one.prompt_cache_hit_tokens >= 2 * B - 1 for one in together)


async def test_a_sequence_that_gave_way_goes_on_without_computing_again(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler_service.core.sequence.HEADROOM", 8)
    asked = [ask(prompt(20, seed=n), seed=n) for n in range(3)]
    computed, results = [], []
    for cache_bytes in (0, 2**20):
        async with serving(model_folder, max_kv_tokens=120, prefix_cache_bytes=cache_bytes) as engine:
            before = metric(engine, "prefilled_tokens_total")
            results.append(await run(engine, *asked))
            assert metric(engine, "preemptions_total") > 0
            computed.append(metric(engine, "prefilled_tokens_total") - before)
            assert [result.prompt_cache_hit_tokens for result in results[-1]] == [0] * 3
    for one, other in zip(*results, strict=True):
        agree(one, other)
    assert computed[1] < 3 * 20 + (computed[0] - 3 * 20) / 3


async def test_a_tiny_cache_evicts_and_changes_nothing(model_folder: Path) -> None:
    asked = [ask(prompt(B * (n % 3) + 20, seed=n % 5), max_tokens=B, num_samples=2, seed=n) for n in range(15)]
    expected = await without_cache(model_folder, *asked)
    async with serving(model_folder) as engine:
        await generate(engine, prompt(B), max_tokens=1)
        block_bytes = engine.scheduler.kv.prefixes.num_bytes
    async with serving(model_folder, prefix_cache_bytes=3 * block_bytes) as engine:
        for _ in range(2):
            for one, other in zip(await run(engine, *asked), expected, strict=True):
                agree(one, other)
        assert metric(engine, "prefix_cache_hits_total") > 0
        assert metric(engine, "prefix_cache_bytes") == 3 * block_bytes


async def test_requests_that_fail_or_break_off_leave_nothing_in_the_cache(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model_folder) as engine:
        broken = make_adapter(engine.targets, seed=1)
        broken.flat[::7] = float("nan")
        await engine.install("broken", broken)
        for fields in ({}, {"prompt_logprobs": True}):
            with pytest.raises(ServiceError, match="not finite"):
                await generate(engine, prompt(3 * B), version_id="broken", num_samples=2, max_tokens=30, **fields)
        prefixes = engine.scheduler.kv.prefixes
        assert prefixes.num_bytes == 0

        await generate(engine, prompt(3 * B), max_tokens=2)
        assert prefixes.num_bytes > 0

        def fail(*args: object) -> None:
            raise torch.OutOfMemoryError("full")

        monkeypatch.setattr(type(engine._runner), "logits", fail)
        with pytest.raises(ServiceError, match="this request is out of memory"):
            await generate(engine, prompt(3 * B), max_tokens=2)
        assert prefixes.num_bytes == 0
        monkeypatch.undo()
        assert (await generate(engine, prompt(3 * B), max_tokens=2)).prompt_cache_hit_tokens == 0


async def test_cancelled_prompts_leave_a_cache_that_is_right(model_folder: Path) -> None:
    one = ask(prompt(4 * B), max_tokens=60, num_samples=2, seed=1)
    (expected,) = await without_cache(model_folder, one)
    async with serving(model_folder, prefill_tokens_per_step=B + 3) as engine:
        for _ in range(4):
            waits = asyncio.create_task((await engine.submit(one)).result())
            await asyncio.sleep(0.005)
            waits.cancel()
        agree(await _one(engine, one), expected)
        agree(await _one(engine, one), expected)
