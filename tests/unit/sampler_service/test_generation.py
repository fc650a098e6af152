"""The engine against stock transformers, and its promises: batching, seeds, stops."""

import asyncio
import gc
import shutil
import time
import weakref
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sampler_service.core.request import Generation, Result, SampledSequence, StopCondition
from sampler_service.torch_engine import scheduler
from sampler_service.torch_engine.engine import TorchEngine
from tests.support.models import make_model
from tests.support.oracle import Oracle
from tests.support.waiting import until
from tests.unit.sampler_service.serving import (
    generate,
    make_adapter,
    metric,
    plain_logits,
    prompt,
    request,
    serving,
    slow_down,
)
from tinsmith.errors import NotReady, OutOfCapacity, ServiceError, VersionNotLoaded
from tinsmith.modeling.kv_cache import SharedPrompts

SHAPES = {
    "grouped queries": {},
    "all heads": {"num_key_value_heads": 4},
    "tied embeddings": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_greedy_equals_transformers(tmp_path: Path, shape: dict[str, object]) -> None:
    folder = make_model(tmp_path, **shape)
    tokens = prompt(9)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model.generate(
        torch.tensor(tokens[None], dtype=torch.int64),
        attention_mask=torch.ones(1, 9, dtype=torch.int64),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    async with serving(folder) as engine:
        result = await generate(engine, tokens, max_tokens=40, temperature=0.0)
    assert list(result.sequences[0].tokens) == expected[0, 9:].tolist()
    assert result.sequences[0].stop_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
async def test_logprobs_are_the_models_own_at_the_requests_temperature(model_folder: Path, temperature: float) -> None:
    tokens = prompt(7)
    async with serving(model_folder) as engine:
        result = await generate(
            engine, tokens, max_tokens=12, temperature=temperature, top_k=20, top_p=0.9, topk_sample_logprobs=5, seed=3
        )
    sequence = result.sequences[0]
    logits = plain_logits(model_folder, [*tokens, *sequence.tokens])[6:-1] / (temperature or 1.0)
    expected = logits.log_softmax(-1)
    sampled = expected.gather(-1, torch.tensor(sequence.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(sequence.logprobs, sampled, atol=1e-4)
    values, ids = expected.topk(5)
    assert sequence.topk is not None
    np.testing.assert_array_equal(sequence.topk.token_ids, ids)
    np.testing.assert_allclose(sequence.topk.logprobs, values, atol=1e-4)


async def test_a_removed_version_leaves_memory_with_its_last_request(model_folder: Path) -> None:
    """At once: between two full collections of Python lie thousands of requests."""
    async with serving(model_folder) as engine:
        adapter = make_adapter(engine.targets, seed=1)
        await engine.install("v1", adapter)
        left = weakref.ref(adapter)
        del adapter
        gc.disable()
        try:
            ended = await engine.submit(request(prompt(8), version_id="v1", num_samples=3, max_tokens=4), stream=True)
            await ended.result()
            engine.store.remove("v1")
            await generate(engine, prompt(8), max_tokens=2)  # the compute thread has heard of it
            await until(lambda: left() is None)
        finally:
            gc.enable()


async def test_adapters_give_what_peft_gives(model_folder: Path, tmp_path: Path) -> None:
    tokens = prompt(8)
    async with serving(model_folder) as engine:
        adapter = make_adapter(engine.targets, seed=1)
        await engine.install("v1", adapter)
        result = await generate(engine, tokens, version_id="v1", max_tokens=10, seed=0)
    sampled = result.sequences[0].tokens
    oracle = Oracle(model_folder, adapter, tmp_path)
    with torch.no_grad():
        expected = oracle.logprobs([*tokens, *sampled][:-1], torch.tensor([*tokens[1:], *sampled]))[7:]
    np.testing.assert_allclose(result.sequences[0].logprobs, expected, atol=1e-4)


async def test_a_mixed_batch_gives_each_what_it_gets_alone(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        await engine.install("a", make_adapter(engine.targets, seed=1, rank=4))
        await engine.install("b", make_adapter(engine.targets, seed=2, rank=8, train_unembed=False))
        await engine.install("c", make_adapter(engine.targets, seed=3, rank=2, train_attn=False))
        asked = [
            request(
                prompt(5 + 3 * n, seed=n),
                version_id=version,
                num_samples=1 + n % 3,
                max_tokens=8 + 5 * n,
                seed=n,
                **how,
            )
            for n, (version, how) in enumerate(
                [
                    ("a", {}),
                    ("", {"top_k": 5}),
                    ("b", {"temperature": 0.0}),
                    ("a", {"top_p": 0.7}),
                    ("c", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
                    ("", {"prompt_logprobs": True}),
                ]
            )
        ]
        alone = [await (await engine.submit(one)).result() for one in asked]
        together = await asyncio.gather(
            *[generation.result() for generation in [await engine.submit(o) for o in asked]]
        )
    for one, other in zip(alone, together, strict=True):
        for left, right in zip(one.sequences, other.sequences, strict=True):
            assert left.tokens == right.tokens
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)


async def test_joining_and_leaving_a_batch_changes_nobodys_tokens(model_folder: Path) -> None:
    async with serving(model_folder, prefill_tokens_per_step=16) as engine:
        alone = await generate(engine, prompt(20), num_samples=3, max_tokens=60, seed=7)
        first = await engine.submit(request(prompt(20), num_samples=3, max_tokens=60, seed=7), stream=True)
        others, seen = [], 0
        async for _ in first.deltas():
            seen += 1
            if seen % 10 == 0:
                others.append(
                    await engine.submit(
                        request(prompt(30 + seen % 90, seed=seen), num_samples=2, max_tokens=1 + seen // 3)
                    )
                )
        again = await first.result()
        await asyncio.gather(*(other.result() for other in others))
    assert [s.tokens for s in again.sequences] == [s.tokens for s in alone.sequences]


async def test_short_prompts_that_overtake_a_long_one_change_nobodys_tokens(model_folder: Path) -> None:
    asked = [request(prompt(200), num_samples=2, max_tokens=10, seed=1)]
    asked += [request(prompt(3 + n, seed=n), num_samples=1 + n % 3, max_tokens=1 + 4 * n, seed=n) for n in range(6)]
    async with serving(model_folder, prefill_tokens_per_step=32) as engine:
        alone = [await (await engine.submit(one)).result() for one in asked]
    async with serving(model_folder, prefill_tokens_per_step=32) as engine:
        generations = [await engine.submit(one) for one in asked]
        together = await asyncio.gather(*(generation.result() for generation in generations))
    for one, other in zip(alone, together, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]


@pytest.mark.parametrize(("owners", "rested"), [(("one", "other"), True), (("one", "one"), False)])
async def test_prompts_of_one_owner_rest_while_another_ones_tokens_are_due(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, owners: tuple[str, str], rested: bool
) -> None:
    """By a clock on which every step takes about as long as any other."""
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(perf_counter=count().__next__, time=time.time))
    rests: list[bool] = []
    async with serving(model_folder, prefill_tokens_per_step=32) as engine:
        plan = engine.scheduler.planner.plan

        def noted(**resting: bool) -> object:
            rests.append(resting["rests"])
            return plan(**resting)

        monkeypatch.setattr(engine.scheduler.planner, "plan", noted)
        running = await engine.submit(request(prompt(5), max_tokens=40, owner=owners[0]))
        others = [await engine.submit(request(prompt(200, seed=n), max_tokens=1, owner=owners[1])) for n in range(3)]
        await asyncio.gather(*(generation.result() for generation in (running, *others)))
    assert any(rests) == rested


async def test_samples_that_share_a_long_prompt_are_the_models_own(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    of = SharedPrompts.of
    monkeypatch.setattr(SharedPrompts, "of", lambda *args: made.append(args[1]) or of(*args))
    async with serving(model_folder) as engine:
        asked = [
            request(prompt(40 + 9 * n, seed=n), num_samples=4 - n, max_tokens=10 + 3 * n, seed=n) for n in range(2)
        ]
        together = await asyncio.gather(
            *[generation.result() for generation in [await engine.submit(one) for one in asked]]
        )
        alone = await generate(engine, asked[0].prompt, max_tokens=10, seed=0)
    assert 40 in made
    assert together[0].sequences[0].tokens == alone.sequences[0].tokens
    for one, result in zip(asked, together, strict=True):
        for sequence in result.sequences:
            logits = plain_logits(model_folder, [*one.prompt, *sequence.tokens])[len(one.prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(sequence.tokens)[:, None])[:, 0]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


async def test_seeds_reproduce_and_samples_differ(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        one = await generate(engine, prompt(6), num_samples=4, max_tokens=12, seed=5)
        same = await generate(engine, prompt(6), num_samples=4, max_tokens=12, seed=5)
        fewer = await generate(engine, prompt(6), num_samples=2, max_tokens=12, seed=5)
        other = await generate(engine, prompt(6), num_samples=4, max_tokens=12, seed=-6)
        unseeded = [await generate(engine, prompt(6), max_tokens=12) for _ in range(2)]
    assert one.sequences == same.sequences
    assert [s.tokens for s in one.sequences[:2]] == [s.tokens for s in fewer.sequences]
    everything = [tuple(s.tokens) for result in [one, other, *unseeded] for s in result.sequences]
    assert len(set(everything)) == len(everything)


async def test_num_samples_share_one_prefill(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        before = metric(engine, "prefilled_tokens_total")
        await generate(engine, prompt(40), num_samples=8, max_tokens=5)
        assert metric(engine, "prefilled_tokens_total") - before == 40


@pytest.mark.parametrize("piece", [1, 7, 16])
async def test_a_prompt_in_pieces_gives_what_the_whole_gives(model_folder: Path, piece: int) -> None:
    asked = request(
        prompt(50),
        num_samples=3,
        max_tokens=10,
        seed=1,
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        prompt_alt_tokens_k=2,
    )
    results = []
    for tokens_per_step in (piece, 512):
        async with serving(model_folder, prefill_tokens_per_step=tokens_per_step) as engine:
            generations = [await engine.submit(request(prompt(30, seed=9), max_tokens=20)), await engine.submit(asked)]
            results.append((await asyncio.gather(*(generation.result() for generation in generations)))[1])
    left, right = results
    assert [s.tokens for s in left.sequences] == [s.tokens for s in right.sequences]
    np.testing.assert_allclose(left.prompt.logprobs, right.prompt.logprobs, atol=1e-5)
    np.testing.assert_array_equal(left.prompt.topk.token_ids, right.prompt.topk.token_ids)
    np.testing.assert_array_equal(left.prompt.alt_tokens.tokens, right.prompt.alt_tokens.tokens)


async def test_a_stop_token_ends_the_sequence_and_is_included(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        free = (await generate(engine, prompt(6), max_tokens=30, seed=2)).sequences[0]
        wanted = free.tokens[10]
        stopped = (
            await generate(engine, prompt(6), max_tokens=30, seed=2, stop=StopCondition(token_ids=(wanted, 511)))
        ).sequences[0]
    assert stopped.tokens == free.tokens[: free.tokens.index(wanted) + 1]
    assert stopped.logprobs == free.logprobs[: len(stopped.tokens)]
    assert stopped.stop_reason == "stop"


async def test_an_absent_stop_is_the_models_end_of_sequence(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    async with serving(folder) as engine:
        free = (await generate(engine, prompt(6), max_tokens=30, seed=2)).sequences[0]
    ends = [free.tokens[12], free.tokens[20]]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    async with serving(folder) as engine:
        absent = (await generate(engine, prompt(6), max_tokens=30, seed=2, stop=None)).sequences[0]
        empty = (await generate(engine, prompt(6), max_tokens=30, seed=2)).sequences[0]
    first = min(free.tokens.index(end) for end in ends)
    assert (absent.tokens, absent.stop_reason) == (free.tokens[: first + 1], "stop")
    assert (empty.tokens, empty.stop_reason) == (free.tokens, "length")


async def test_a_stop_is_added_to_the_models_end_of_sequence(tmp_path: Path, text_model_folder: Path) -> None:
    folder = shutil.copytree(text_model_folder, tmp_path / "model")
    vocab_size = len(AutoTokenizer.from_pretrained(folder))

    async def drawn(stop: StopCondition) -> SampledSequence:
        async with serving(folder) as engine:
            result = await generate(engine, prompt(6, vocab_size=vocab_size), max_tokens=30, seed=2, stop=stop)
        return result.sequences[0]

    free = (await drawn(StopCondition())).tokens
    end, later = free[8], next(token for token in free[9:] if token not in free[:9])
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
    for stop in (StopCondition(token_ids=(later,)), StopCondition(strings=("never drawn",))):
        ended = await drawn(stop)
        assert (ended.tokens, ended.stop_reason) == (free[: free.index(end) + 1], "stop")


async def test_a_stop_string_ends_at_the_token_that_completes_it(text_model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(text_model_folder)
    vocab_size = len(tokenizer)
    async with serving(text_model_folder) as engine:
        tokens = prompt(6, vocab_size=vocab_size)
        free = (await generate(engine, tokens, max_tokens=60, seed=4)).sequences[0]
        # A string of printable characters that crosses tokens, as it first appears in the decoded output.
        for end in range(20, 60):
            string = tokenizer.decode(free.tokens[end - 1 : end + 1])
            if string.isascii() and string.isprintable() and len(string) > 1:
                break
        stopped = (
            await generate(engine, tokens, max_tokens=60, seed=4, stop=StopCondition(strings=("never seen", string)))
        ).sequences[0]
    length = len(stopped.tokens)
    assert stopped.stop_reason == "stop"
    assert stopped.tokens == free.tokens[:length]
    assert string in tokenizer.decode(stopped.tokens)
    assert string not in tokenizer.decode(stopped.tokens[:-1])


async def test_stop_strings_without_a_tokenizer_are_refused_by_name(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        with pytest.raises(ServiceError, match=r"sampling_params\.stop\.strings: need a tokenizer") as caught:
            await engine.submit(request(prompt(4), max_tokens=2, stop=StopCondition(strings=("x",))))
    assert caught.value.metadata["field"] == "sampling_params.stop.strings"


async def test_absent_max_tokens_goes_to_the_end_of_the_context(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        result = await generate(engine, prompt(200), num_samples=2)
    assert [len(s.tokens) for s in result.sequences] == [56, 56]
    assert result.sequences[0].stop_reason == "length"


async def test_unlimited_sequences_give_way_and_end_the_same(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler_service.core.sequence.HEADROOM", 16)
    async with serving(model_folder) as engine:
        roomy = await asyncio.gather(*(generate(engine, prompt(20, seed=n), seed=n) for n in range(4)))
        assert metric(engine, "preemptions_total") == 0
    # Room for four short ones or one long one.
    async with serving(model_folder, max_kv_tokens=260) as engine:
        generations = [await engine.submit(request(prompt(20, seed=n), seed=n)) for n in range(4)]
        bounded = await engine.submit(request(prompt(20, seed=9), max_tokens=100, seed=9))
        tight = await asyncio.gather(*(generation.result() for generation in generations))
        assert len((await bounded.result()).sequences[0].tokens) == 100
        assert metric(engine, "preemptions_total") > 0
    for one, other in zip(roomy, tight, strict=True):
        assert one.sequences[0].tokens == other.sequences[0].tokens
        assert len(one.sequences[0].tokens) == 236


@pytest.mark.parametrize("prefix_cache_bytes", [0, None])
async def test_sequences_that_another_owner_interrupts_end_as_alone(
    model_folder: Path, prefix_cache_bytes: int | None
) -> None:
    """The other owner's request does not wait for the end of any of them."""

    async def run(engine: TorchEngine) -> tuple[list[Generation], Result]:
        asked = [
            request(prompt(6, seed=n), max_tokens=200, num_samples=2, seed=n, owner="a", topk_sample_logprobs=2)
            for n in range(2)
        ]
        generations = [await engine.submit(one) for one in asked]
        await until(lambda: metric(engine, "running_sequences") == 4)
        ended = metric(engine, "requests_total", outcome="ok")
        other = await generate(engine, prompt(20), max_tokens=4, seed=9, owner="b")
        assert metric(engine, "requests_total", outcome="ok") == ended + 1
        return generations, other

    async with serving(model_folder) as engine:
        generations, other = await run(engine)
        alone = [other, *await asyncio.gather(*(one.result() for one in generations))]
        assert metric(engine, "preemptions_total") == 0
    async with serving(model_folder, max_running=4, prefix_cache_bytes=prefix_cache_bytes) as engine:
        generations, other = await run(engine)
        beside = [other, *await asyncio.gather(*(one.result() for one in generations))]
        assert metric(engine, "preemptions_total") == 1
    for one, interrupted in zip(alone, beside, strict=True):
        for mine, its in zip(one.sequences, interrupted.sequences, strict=True):
            assert mine.tokens == its.tokens
            np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=1e-4)
            if mine.topk is not None and its.topk is not None:
                np.testing.assert_array_equal(mine.topk.token_ids, its.topk.token_ids)


async def test_sequences_of_different_sizes_are_each_as_alone(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that outgrows its lane, and one whose prompt is computed beside them in pieces."""
    asked = [(5, 20), (60, 30), (180, 40), (20, None), (8, 100), (130, 20)]

    async def run(engine: TorchEngine, n: int) -> Result:
        length, max_tokens = asked[n]
        return await generate(engine, prompt(length, seed=n), max_tokens=max_tokens, seed=n, num_samples=2)

    async with serving(model_folder) as engine:
        alone = [await run(engine, n) for n in range(len(asked))]
    monkeypatch.setattr("sampler_service.torch_engine.waiting.SHORT_TOKENS", 32)
    monkeypatch.setattr("sampler_service.core.sequence.HEADROOM", 8)
    async with serving(model_folder, max_kv_tokens=1400, prefill_tokens_per_step=50) as engine:
        together = await asyncio.gather(*(run(engine, n) for n in range(len(asked))))
        assert len(engine.scheduler.kv.caches) == 3
    for one, other in zip(alone, together, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        for mine, its in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=1e-4)


async def test_more_samples_than_places_run_in_turns(model_folder: Path) -> None:
    async with serving(model_folder, max_running=3, max_kv_tokens=128) as engine:
        narrow = await generate(engine, prompt(10), num_samples=8, max_tokens=30, seed=1, prompt_logprobs=True)
    async with serving(model_folder) as engine:
        wide = await generate(engine, prompt(10), num_samples=8, max_tokens=30, seed=1, prompt_logprobs=True)
    assert [s.tokens for s in narrow.sequences] == [s.tokens for s in wide.sequences]
    np.testing.assert_allclose(narrow.prompt.logprobs, wide.prompt.logprobs, atol=1e-5)


async def test_scores_of_a_prompt_do_not_wait_for_a_full_batch(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        alone = await generate(engine, prompt(12), max_tokens=1, seed=1, prompt_logprobs=True)
    async with serving(model_folder, max_running=2, max_kv_tokens=2048) as engine:
        running = await engine.submit(request(prompt(6), num_samples=2, max_tokens=240, seed=1), stream=True)
        waiting = await engine.submit(request(prompt(6), num_samples=2, max_tokens=240, seed=1))
        scored = await generate(engine, prompt(12), max_tokens=1, seed=1, prompt_logprobs=True)
        assert metric(engine, "running_sequences") == 2
        assert metric(engine, "waiting_requests") == 1
        one, other = await running.result(), await waiting.result()
    assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
    np.testing.assert_allclose(scored.prompt.logprobs, alone.prompt.logprobs, atol=1e-5)


async def test_streaming_gives_the_result_piece_by_piece(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        generation = await engine.submit(request(prompt(6), num_samples=3, max_tokens=9, seed=1), stream=True)
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for delta in generation.deltas():
            tokens[delta.index] += delta.tokens
        result = await generation.result()
    assert [list(s.tokens) for s in result.sequences] == list(tokens.values())


async def test_cancelling_frees_the_lanes(model_folder: Path) -> None:
    async with serving(model_folder, max_running=2) as engine:
        long = await engine.submit(request(prompt(6), num_samples=2, max_tokens=240), stream=True)
        async for _ in long.deltas():
            break  # leaving the stream cancels
        with pytest.raises(ServiceError, match="left"):
            await long.result()
        running = asyncio.create_task(generate(engine, prompt(6), num_samples=2, max_tokens=240))
        waiting = asyncio.create_task(generate(engine, prompt(6), num_samples=2, max_tokens=240))
        await asyncio.sleep(0)
        for task in (waiting, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await generate(engine, prompt(6), max_tokens=2)
        assert metric(engine, "running_sequences") == 0
        assert metric(engine, "waiting_requests") == 0


async def test_a_diverged_adapter_fails_its_own_request_only(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        expected = [(await generate(engine, prompt(12, seed=n), max_tokens=30, seed=n)).sequences for n in range(3)]
        broken = make_adapter(engine.targets, seed=1)
        broken.flat[::7] = float("nan")
        await engine.install("broken", broken)
        generations = []
        for n in range(3):
            bad = await engine.submit(request(prompt(60), version_id="broken", num_samples=2, max_tokens=30, top_p=0.9))
            generations.append((bad, await engine.submit(request(prompt(12, seed=n), max_tokens=30, seed=n))))
        for n, (bad, good) in enumerate(generations):
            with pytest.raises(ServiceError, match="version 'broken' gave logits that are not finite"):
                await bad.result()
            assert (await good.result()).sequences[0].tokens == expected[n][0].tokens
        # And nothing of it is left in the lanes that it used.
        again = [await engine.submit(request(prompt(12, seed=n), max_tokens=30, seed=n)) for n in range(3)]
        assert [(await one.result()).sequences[0].tokens for one in again] == [s[0].tokens for s in expected]


async def test_installing_versions_leaves_a_running_generation_bit_equal(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        flat_bytes = make_adapter(engine.targets, seed=0).num_bytes
    async with serving(model_folder, adapter_memory_bytes=2 * flat_bytes) as engine:
        await engine.install("v0", make_adapter(engine.targets, seed=0))
        quiet = await generate(engine, prompt(8), version_id="v0", max_tokens=80, seed=0)
        generation = await engine.submit(request(prompt(8), version_id="v0", max_tokens=80, seed=0), stream=True)
        count = 0
        async for _ in generation.deltas():
            count += 1
            if count % 20 == 0:
                await engine.install(f"v{count}", make_adapter(engine.targets, seed=count))
        assert (await generation.result()).sequences == quiet.sequences
        await engine.install("last", make_adapter(engine.targets, seed=1))
        await engine.install("very last", make_adapter(engine.targets, seed=2))
        with pytest.raises(VersionNotLoaded, match="'v0' is not loaded"):
            await engine.submit(request(prompt(8), version_id="v0", max_tokens=1))


async def test_an_engine_that_cannot_compute_is_dead(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model_folder) as engine:

        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("device lost")

        monkeypatch.setattr(type(engine.base), "hidden_states", fail)
        with pytest.raises(ServiceError, match="died: device lost"):
            await generate(engine, prompt(4), max_tokens=3)
        assert engine.requests.died.is_set()
        with pytest.raises(ServiceError, match="died"):
            await engine.submit(request(prompt(4), max_tokens=3))


async def test_a_stopping_engine_fails_what_is_left(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(model_folder) as engine:
        slow_down(engine, monkeypatch)
        generation = await engine.submit(request(prompt(4), max_tokens=250))
    with pytest.raises(NotReady, match="shutting down"):
        await generation.result()


async def test_the_canary_of_a_publish_waits_for_no_place_and_no_queue_is_too_full_for_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model_folder, max_running=2, max_waiting=1, max_kv_tokens=1024) as engine:
        slow_down(engine, monkeypatch)
        await engine.install("v", make_adapter(engine.targets, seed=1), on_probation=True)
        for n in range(3):
            await engine.submit(request(prompt(6), max_tokens=250, seed=n))
            await until(lambda n=n: n == 2 or len(engine.requests.waiting) == 0)
        with pytest.raises(OutOfCapacity):
            await generate(engine, prompt(6), version_id="v", max_tokens=1)
        await generate(engine, prompt(6), version_id="v", max_tokens=1, prompt_logprobs=True, on_probation=True)
        assert len(engine.requests.waiting) == 1
        assert metric(engine, "running_sequences") == 2, "the batch was full all the time"
        assert 4 < metric(engine, "sampled_tokens_total") < 250, "and nobody has ended"


async def test_where_the_cache_is_full_the_canary_of_a_publish_is_next(model_folder: Path) -> None:
    async with serving(model_folder, max_kv_tokens=256) as engine:
        running = await engine.submit(request(prompt(6), max_tokens=200))
        await until(lambda: len(engine.requests.waiting) == 0)
        await asyncio.gather(*[engine.submit(request(prompt(6), max_tokens=200, seed=n)) for n in range(3)])
        await generate(engine, prompt(6), max_tokens=1, prompt_logprobs=True, on_probation=True)
        await running.result()
        assert len(engine.requests.waiting) >= 2, "it has passed those"


async def test_owners_of_the_base_model_take_turns(model_folder: Path) -> None:
    """And so do those of one run, whose checkpoint others may sample, too."""
    async with serving(model_folder, max_running=1) as engine:
        ends: list[str] = []

        async def sample(owner: str) -> None:
            generation = await engine.submit(request(prompt(8), max_tokens=8, owner=owner))
            await generation.result()
            ends.append(owner)

        many = [asyncio.create_task(sample("a")) for _ in range(40)]
        await asyncio.sleep(0)
        await sample("b")
        before = len(ends)
        await asyncio.gather(*many)
    assert before < 20
