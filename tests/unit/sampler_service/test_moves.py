"""Generations that follow a run: they move to its newer versions between tokens, with the keys and values they have."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from sampler_service.core.request import Request, Result, SampledSequence
from sampler_service.torch_engine.engine import Stop, TorchEngine
from sampler_service.torch_engine.kv_cache import BLOCK_TOKENS
from tests.support.switching import plain_model, switching_logprobs
from tests.support.waiting import until
from tests.unit.sampler_service.full_versions import make_full, save
from tests.unit.sampler_service.serving import generate, make_adapter, metric, prompt, request, serving
from tinsmith.errors import InvalidRequest, NotReady, VersionNotLoaded

RUN = "s:train:0"


def version(number: int) -> str:
    return f"{RUN}@{number}"


class Steps:
    """Lets the compute thread make one step after another, at the test's word. The first one after it has been idle it
    makes at once."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._permits = threading.Semaphore(0)
        self._made = metric(engine, "step_seconds_count") + 1

    def gate(self) -> None:
        if not self._engine.scheduler.idle:
            self._permits.acquire()

    def open(self, count: int = 1000) -> None:
        self._permits.release(count)

    async def __call__(self, count: int = 1) -> None:
        """Returns when so many more are made. Work that was put in before is done before the first of them."""
        self._made += count
        self._permits.release(count)
        await until(lambda: metric(self._engine, "step_seconds_count") == self._made)


@contextmanager
def stepping(engine: TorchEngine) -> Iterator[Steps]:
    steps, take = Steps(engine), engine._take

    def gated() -> bool:
        steps.gate()
        return take()

    engine._take = gated  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        engine._take = take  # type: ignore[method-assign]
        steps.open()


@pytest_asyncio.fixture
async def engine(model_folder: Path) -> AsyncIterator[TorchEngine]:
    async with serving(model_folder, prefill_tokens_per_step=32) as engine:
        for number in (1, 2, 3):
            await engine.install(version(number), make_adapter(engine.targets, seed=number, rank=2 * number))
        yield engine


def following(tokens: Any, **fields: Any) -> Request:
    return request(tokens, **{"version_id": version(1), "follow_run": RUN, "seed": 1, **fields})


async def moved(engine: TorchEngine, asked: Request, *, at: dict[int, int]) -> Result:
    """Its result, when it is moved as soon as `at` tokens have come: to the version of that number."""
    with stepping(engine) as steps:
        generation = await engine.submit(asked, stream=True)
        steps.open(2)
        count = 0
        async for delta in generation.deltas():
            for _ in delta.tokens:
                count += 1
                if count % asked.num_samples == 0:
                    steps.open(1)
                if count in at:
                    assert await engine.move(RUN, version(at[count])) == asked.num_samples
        return await generation.result()


def spans(sequence: SampledSequence) -> list[tuple[str, int]]:
    return [(span.version_id, span.num_tokens) for span in sequence.spans]


def names(sequence: SampledSequence) -> list[str]:
    return [span.version_id for span in sequence.spans]


@pytest.fixture
def models(model_folder: Path, tmp_path: Path, engine: TorchEngine) -> dict[str, Any]:
    """The base model and the versions, by stock transformers and PEFT."""
    made = {"": plain_model(model_folder)}
    for number in (1, 2, 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        make_adapter(engine.targets, seed=number, rank=2 * number).save_peft(folder, base_model=str(model_folder))
        made[version(number)] = plain_model(model_folder, folder)
    return made


def check_logprobs(models: dict[str, Any], tokens: Any, sequences: Sequence[SampledSequence]) -> None:
    for sequence in sequences:
        expected = switching_logprobs(models, tokens.tolist(), sequence.tokens, spans(sequence))
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


async def test_each_token_has_the_logprob_of_the_version_of_its_span(
    engine: TorchEngine, models: dict[str, Any]
) -> None:
    tokens = prompt(20)
    alone = await generate(engine, prompt(15), version_id=version(1), max_tokens=90, seed=5)
    beside = await engine.submit(request(prompt(15), version_id=version(1), max_tokens=90, seed=5))
    result = await moved(engine, following(tokens, num_samples=3, max_tokens=60), at={30: 2, 90: 3})
    for sequence in result.sequences:
        assert names(sequence) == [version(1), version(2), version(3)]
        assert sum(span.num_tokens for span in sequence.spans) == 60
    check_logprobs(models, tokens, result.sequences)
    # The span makes the difference: no version by itself gives these.
    for name in (version(1), version(3)):
        sequence = result.sequences[0]
        pure = switching_logprobs(models, tokens.tolist(), sequence.tokens, [(name, 60)])
        assert np.abs(pure - sequence.logprobs).max() > 0.1
    kept = (await beside.result()).sequences[0]
    assert (kept.tokens, kept.spans) == (alone.sequences[0].tokens, ())
    assert metric(engine, "moved_sequences_total") == 6


async def test_from_the_base_model_to_a_version(engine: TorchEngine, models: dict[str, Any]) -> None:
    result = await moved(engine, following(prompt(9), version_id="", max_tokens=30), at={10: 1})
    assert names(result.sequences[0]) == ["", version(1)]
    check_logprobs(models, prompt(9), result.sequences)


async def test_versions_of_all_parameters_move_too(model_folder: Path, tmp_path: Path) -> None:
    models = {}
    async with serving(model_folder) as engine:
        for number in (1, 2):
            weights = make_full(engine.base, seed=number)
            models[version(number)] = plain_model(save(weights, tmp_path / str(number)))
            await engine.install(version(number), weights)
        result = await moved(engine, following(prompt(9), num_samples=2, max_tokens=30), at={20: 2})
        assert [one.num_running for one in engine.store.versions()] == [0, 0]
    assert names(result.sequences[0]) == [version(1), version(2)]
    check_logprobs(models, prompt(9), result.sequences)


async def test_a_move_to_equal_weights_changes_no_bit(engine: TorchEngine) -> None:
    """The random numbers go on where they were, and so do keys, values, stops and tables."""
    for number in (7, 8):
        await engine.install(version(number), make_adapter(engine.targets, seed=7))
    # Shorter than what the prefix cache holds: what it gives back is equal but for rounding.
    asked = following(
        prompt(BLOCK_TOKENS - 1),
        version_id=version(7),
        num_samples=2,
        max_tokens=50,
        temperature=0.8,
        topk_sample_logprobs=2,
    )
    quiet = await (await engine.submit(asked)).result()
    result = await moved(engine, asked, at={40: 8})
    for one, other in zip(quiet.sequences, result.sequences, strict=True):
        assert names(one) == [version(7)]
        assert names(other) == [version(7), version(8)]
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        assert one.topk is not None
        assert other.topk is not None
        np.testing.assert_array_equal(one.topk.logprobs, other.topk.logprobs)


async def test_the_version_that_was_left_may_be_evicted_while_the_generation_goes_on(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        num_bytes = make_adapter(engine.targets, seed=0).num_bytes
    async with serving(model_folder, adapter_memory_bytes=2 * num_bytes) as engine:
        for number in (1, 2):
            await engine.install(version(number), make_adapter(engine.targets, seed=number))
        with stepping(engine) as steps:
            generation = await engine.submit(following(prompt(9), num_samples=2, max_tokens=30))
            await steps(3)  # the prompt and three tokens more
            moving = asyncio.create_task(engine.move(RUN, version(2)))
            await asyncio.sleep(0)
            await steps()
            assert await moving == 2
            assert [(one.version_id, one.num_running) for one in engine.store.versions()] == [
                (version(1), 0),
                (version(2), 1),
            ]
            await engine.install("other", make_adapter(engine.targets, seed=3))
            assert [one.version_id for one in engine.store.versions()] == ["other", version(2)]
        assert [span.num_tokens for span in (await generation.result()).sequences[0].spans] == [4, 26]
        assert [one.num_running for one in engine.store.versions()] == [0, 0]


async def test_no_request_finds_what_two_versions_have_computed(engine: TorchEngine, model_folder: Path) -> None:
    asked = following(prompt(20), max_tokens=60)
    first = await moved(engine, asked, at={30: 2})
    turn = np.concatenate([asked.prompt, first.sequences[0].tokens]).astype(np.int32)
    again = [
        await generate(engine, turn, version_id=version(number), max_tokens=9, seed=3, prompt_logprobs=scored)
        for number in (1, 2)
        for scored in (False, True)
    ]
    # The prompt was computed by the first version alone; what it has drawn before the move is not kept either.
    assert [one.prompt_cache_hit_tokens for one in again] == [BLOCK_TOKENS, 0, 0, 0]
    async with serving(model_folder, prefix_cache_bytes=0) as plain:
        for number in (1, 2):
            await plain.install(version(number), make_adapter(engine.targets, seed=number, rank=2 * number))
            expected = await generate(plain, turn, version_id=version(number), max_tokens=9, seed=3)
            for one in again[2 * number - 2 : 2 * number]:
                assert one.sequences[0].tokens == expected.sequences[0].tokens
                np.testing.assert_allclose(one.sequences[0].logprobs, expected.sequences[0].logprobs, atol=2e-5)


async def test_waiting_requests_begin_on_the_new_version(model_folder: Path) -> None:
    """Other samples of a request that runs already, too."""
    async with serving(model_folder, max_running=1) as engine:
        for number in (1, 2):
            await engine.install(version(number), make_adapter(engine.targets, seed=number))
        scored = await generate(engine, prompt(9), version_id=version(2), max_tokens=1, prompt_logprobs=True)
        with stepping(engine) as steps:
            running = await engine.submit(following(prompt(9), num_samples=2, max_tokens=10, prompt_logprobs=True))
            waiting = await engine.submit(following(prompt(9), max_tokens=10, prompt_logprobs=True))
            await steps(3)  # the prompt and three tokens more
            moving = asyncio.create_task(engine.move(RUN, version(2)))
            await asyncio.sleep(0)
            await steps()
            assert await moving == 3
        both, late = await running.result(), await waiting.result()
    assert [spans(sequence) for sequence in both.sequences] == [[(version(1), 4), (version(2), 6)], [(version(2), 10)]]
    assert [spans(sequence) for sequence in late.sequences] == [[(version(2), 10)]]
    np.testing.assert_array_equal(late.prompt.logprobs, scored.prompt.logprobs)
    assert both.prompt.logprobs is not None
    assert scored.prompt.logprobs is not None
    assert np.abs(both.prompt.logprobs - scored.prompt.logprobs)[1:].max() > 0.1


async def test_a_prompt_that_is_half_computed_is_finished_by_the_version_that_began_it(
    engine: TorchEngine, models: dict[str, Any]
) -> None:
    tokens = prompt(100)
    scored = await generate(engine, tokens, version_id=version(1), max_tokens=1, prompt_logprobs=True)
    with stepping(engine) as steps:
        generation = await engine.submit(following(tokens, num_samples=2, max_tokens=10, prompt_logprobs=True))
        await steps()
        for number in (2, 3):
            moving = asyncio.create_task(engine.move(RUN, version(number)))
            await asyncio.sleep(0)
            await steps()
            assert await moving == 2
        running = {one.version_id: one.num_running for one in engine.store.versions()}
        assert running == {version(1): 0, version(2): 0, version(3): 1}
    result = await generation.result()
    np.testing.assert_array_equal(result.prompt.logprobs, scored.prompt.logprobs)
    assert [spans(sequence) for sequence in result.sequences] == 2 * [[(version(1), 1), (version(3), 9)]]
    check_logprobs(models, tokens, result.sequences)


async def test_an_interrupted_sequence_is_computed_anew_by_the_new_version_alone(
    model_folder: Path, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave its lane back before the move, so there are no older keys and values to go on from."""
    monkeypatch.setattr("sampler_service.core.sequence.HEADROOM", 16)
    async with serving(model_folder, max_kv_tokens=300) as engine:
        for number in (1, 2):
            await engine.install(version(number), make_adapter(engine.targets, seed=number, rank=2 * number))
        with stepping(engine) as steps:
            generation = await engine.submit(following(prompt(20), num_samples=2))
            while metric(engine, "preemptions_total") == 0:
                await steps()
            moving = asyncio.create_task(engine.move(RUN, version(2)))
            await asyncio.sleep(0)
            await steps()
            assert await moving == 2
        result = await generation.result()
        assert metric(engine, "preemptions_total") == 1
        kept, anew = sorted(result.sequences, key=lambda sequence: sequence.spans[0].num_tokens, reverse=True)
        check_logprobs(models, prompt(20), [kept])
        (_, before), (name, _) = spans(anew)
        pure = switching_logprobs(models, prompt(20).tolist(), anew.tokens, [(name, len(anew.tokens))])
        np.testing.assert_allclose(anew.logprobs[before:], pure[before:], atol=1e-4)
        assert np.abs(pure[:before] - anew.logprobs[:before]).max() > 0.1
        # And what one version has computed may be found.
        turn = np.concatenate([prompt(20), anew.tokens[:100]]).astype(np.int32)
        again = await generate(engine, turn, version_id=version(2), max_tokens=1)
        assert again.prompt_cache_hit_tokens >= 100


async def test_a_sequence_interrupted_after_a_move_is_of_one_version_again(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler_service.core.sequence.HEADROOM", 16)
    async with serving(model_folder, max_kv_tokens=300) as engine:
        for number in (1, 2):
            await engine.install(version(number), make_adapter(engine.targets, seed=number))
        asked = [following(prompt(20, seed=n), seed=n) for n in (1, 2)]
        with stepping(engine) as steps:
            generations = [await engine.submit(one) for one in asked]
            await steps(5)
            moving = asyncio.create_task(engine.move(RUN, version(2)))
            await asyncio.sleep(0)
            await steps()
            assert await moving == 2
        results = [(await generation.result()).sequences[0] for generation in generations]
        assert metric(engine, "preemptions_total") == 1  # of the younger one
        found = []
        for one, sequence in zip(asked, results, strict=True):
            assert names(sequence) == [version(1), version(2)]
            turn = np.concatenate([one.prompt, sequence.tokens[:100]]).astype(np.int32)
            found.append((await generate(engine, turn, version_id=version(2), max_tokens=1)).prompt_cache_hit_tokens)
    assert found == [0, 112]


async def test_a_request_that_crosses_with_a_move_begins_on_the_newest_resident_version(engine: TorchEngine) -> None:
    assert await engine.move(RUN, version(2)) == 0
    crossed = await (await engine.submit(following(prompt(9), max_tokens=4))).result()
    assert names(crossed.sequences[0]) == [version(2)]
    newer = await (await engine.submit(following(prompt(9), version_id=version(3), max_tokens=4))).result()
    assert names(newer.sequences[0]) == [version(3)]
    other = await (await engine.submit(request(prompt(9), version_id=version(1), max_tokens=4, seed=1))).result()
    quiet = await generate(engine, prompt(9), version_id=version(1), max_tokens=4, seed=1)
    assert other == quiet
    engine.store.remove(version(1))
    crossed = await (await engine.submit(following(prompt(9), max_tokens=4))).result()
    assert names(crossed.sequences[0]) == [version(2)]
    engine.store.remove(version(2))
    with pytest.raises(VersionNotLoaded, match="@1' is not loaded"):
        await engine.submit(following(prompt(9), max_tokens=4))


async def test_nothing_moves_back_or_twice(engine: TorchEngine) -> None:
    with stepping(engine) as steps:
        generation = await engine.submit(following(prompt(9), version_id=version(2), max_tokens=20))
        for number, expected in ((1, 0), (2, 0), (3, 1), (3, 0), (2, 0)):
            moving = asyncio.create_task(engine.move(RUN, version(number)))
            await asyncio.sleep(0)
            await steps()
            assert await moving == expected
    assert names((await generation.result()).sequences[0]) == [version(2), version(3)]


async def test_generations_of_a_run_do_not_move_to_another_run_that_has_its_id(engine: TorchEngine) -> None:
    old, new, newer = f"{RUN}@9.aa", f"{RUN}@3.bb", f"{RUN}@4.bb"
    for seed, name in enumerate((old, new, newer)):
        await engine.install(name, make_adapter(engine.targets, seed=seed))
    with stepping(engine) as steps:
        generations = [await engine.submit(following(prompt(9), version_id=name, max_tokens=6)) for name in (old, new)]
        await steps()
        for name, expected in ((old, 0), (newer, 1)):
            moving = asyncio.create_task(engine.move(RUN, name))
            await asyncio.sleep(0)
            await steps()
            assert await moving == expected
        late = await engine.submit(following(prompt(9), version_id=old, max_tokens=2))
    drawn = [names((await generation.result()).sequences[0]) for generation in [*generations, late]]
    assert drawn == [[old], [new, newer], [old]]


async def test_moves_are_of_one_run(engine: TorchEngine) -> None:
    await engine.install("other@5", make_adapter(engine.targets, seed=4))
    with pytest.raises(InvalidRequest, match="version_id: 'other@5' is not a version of run 's:train:0'"):
        await engine.move(RUN, "other@5")
    with pytest.raises(InvalidRequest, match="version_id: 'other@5' is not a version of run 's:train:0'"):
        await engine.submit(following(prompt(9), version_id="other@5"))
    with pytest.raises(VersionNotLoaded, match="@9' is not loaded"):
        await engine.move(RUN, version(9))
    with stepping(engine) as steps:
        generation = await engine.submit(following(prompt(9), max_tokens=6))
        moving = asyncio.create_task(engine.move("other", "other@5"))
        await asyncio.sleep(0)
        await steps()
        assert await moving == 0
    assert names((await generation.result()).sequences[0]) == [version(1)]


async def test_a_cancelled_request_lets_go_of_all_its_versions(engine: TorchEngine) -> None:
    with stepping(engine) as steps:
        generation = await engine.submit(following(prompt(100), max_tokens=50), stream=True)
        await steps()
        moving = asyncio.create_task(engine.move(RUN, version(2)))
        await asyncio.sleep(0)
        await steps()
        await moving
        assert [one.num_running for one in engine.store.versions()] == [1, 1, 0]  # its prompt is half computed
        deltas = generation.deltas()
        waiting = asyncio.create_task(anext(deltas))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    with pytest.raises(Exception, match="left"):
        await generation.result()
    assert [one.num_running for one in engine.store.versions()] == [0, 0, 0]


async def test_a_move_that_a_stopping_engine_does_not_make_is_no_success(model_folder: Path) -> None:
    async with serving(model_folder) as engine:
        for number in (1, 2):
            await engine.install(version(number), make_adapter(engine.targets, seed=number))
        with stepping(engine):
            await engine.submit(following(prompt(9), max_tokens=50))
            engine.commands.put(Stop())
            moving = asyncio.create_task(engine.move(RUN, version(2)))
            await asyncio.sleep(0)
    with pytest.raises(NotReady, match="shutting down"):
        await moving
