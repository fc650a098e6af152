"""An exception in any phase of the sampler's loops fails one request alone, or ends the engine, and health hears of it
before any request does. No request waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sampler_service.core.engine import OpenRequests
from sampler_service.core.request import Result
from sampler_service.core.room import Room
from sampler_service.core.scoring import PromptScorer
from sampler_service.core.sequence import Sequence, SequenceGroup
from sampler_service.torch_engine import runner
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.torch_engine.kv_cache import KVCacheManager
from sampler_service.torch_engine.planner import Planner
from sampler_service.torch_engine.runner import Batch, Runner
from sampler_service.torch_engine.scheduler import Scheduler
from sampler_service.torch_engine.waiting import Waiting
from tests.support.waiting import until
from tests.unit.sampler_service.serving import (
    generate,
    leave,
    make_adapter,
    metric,
    prompt,
    request,
    serving,
    slow_down,
)
from tinsmith.errors import EngineDead, OutOfCapacity, ServiceError

LIMIT_S = 60.0
MARK = 77
"""The guilty request's prompt begins with it."""


def raising_once(true_function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """At its next call, and never again."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, true_function)
        raise ValueError("no such luck")

    monkeypatch.setattr(owner, name, fail)


def raising_for_the_guilty(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, task_of: Callable[..., Any]) -> None:
    true_function = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if task_of(*args).prompt[0] == MARK:
            raise ValueError("no such luck")
        return true_function(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail)


async def outcomes(engine: TorchEngine) -> list[Result | BaseException]:
    """Outcomes of five requests that score, stream and draw several samples. The third one causes the failure."""
    prompts = [prompt(40, seed=n) for n in range(5)]
    prompts[2][0] = MARK
    running = []
    for n, tokens in enumerate(prompts):
        asked = request(tokens, num_samples=2, max_tokens=12, seed=n, prompt_logprobs=True, topk_sample_logprobs=3)
        running.append(await engine.submit(asked, stream=n % 2 == 0))
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.gather(*(one.result() for one in running), return_exceptions=True)


_undisturbed: list[Result | BaseException] = []


async def expected_outcomes(folder: Path) -> list[Result | BaseException]:
    """`outcomes` of an engine in which nothing fails, computed once."""
    if not _undisturbed:
        async with serving(folder) as engine:
            _undisturbed.extend(await outcomes(engine))
    return _undisturbed


def check_nothing_left(engine: TorchEngine) -> None:
    assert not engine.requests
    assert len(engine.requests.waiting) == 0
    assert metric(engine, "waiting_requests") == 0
    scheduler = engine.scheduler
    assert not scheduler.groups
    assert scheduler.idle


ALONE = {
    "reuse": (KVCacheManager, "reuse", lambda lanes, job: job.group.request),
    "score": (PromptScorer, "add", lambda scorer, *rest: scorer.request),
    "delta": (Sequence, "delta", lambda sequence, *rest: sequence.group.request),
    "take": (Sequence, "take", lambda sequence, *rest: sequence.group.request),
    "result": (SequenceGroup, "result", lambda group: group.request),
}


@pytest.mark.parametrize("phase", ALONE)
async def test_an_error_of_one_request_fails_it_alone(
    phase: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await expected_outcomes(model_folder)
    async with serving(model_folder) as engine:
        raising_for_the_guilty(monkeypatch, *ALONE[phase])
        found = await outcomes(engine)
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            if n == 2:
                assert isinstance(one, ServiceError)
                assert one.message == "the engine failed in this request: no such luck; the log has the cause"
            else:
                assert isinstance(one, Result)
                assert isinstance(other, Result)
                assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        assert not engine.requests.died.is_set()
        check_nothing_left(engine)
        await generate(engine, prompt(40), max_tokens=3)


def blamed(found: list[Result | BaseException]) -> list[int]:
    """The requests that may be the cause of the engine's death, as the gateway hears it."""
    return [n for n, one in enumerate(found) if isinstance(one, EngineDead) and one.metadata["computing"] == "yes"]


NAMED = {
    "add": (Scheduler, "add", lambda scheduler, jobs: jobs[0].group.request),
    "queue": (Waiting, "append", lambda waiting, job: job.group.request),
    "take": (Waiting, "take", lambda waiting, job: job.group.request),
    "reserve": (Planner, "_reserve", lambda planner, job: job.group.request),
    "cancel": (Scheduler, "_end", lambda scheduler, group, outcome: group.request),
}


@pytest.mark.parametrize("phase", NAMED)
async def test_an_error_at_one_request_is_charged_to_it_and_to_those_that_are_computed(
    phase: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model_folder, max_running=2) as engine:
        slow_down(engine, monkeypatch)
        raising_for_the_guilty(monkeypatch, *NAMED[phase])
        short = phase in ("take", "reserve")  # these wait until the first one has ended
        prompts = [prompt(40, seed=n) for n in range(4)]
        prompts[1][0] = MARK
        running = [await engine.submit(request(prompts[0], num_samples=2, max_tokens=2 if short else 200))]
        await until(lambda: metric(engine, "running_sequences") == 2)
        running += [await engine.submit(request(one, num_samples=2, max_tokens=200)) for one in prompts[1:]]
        if phase == "cancel":
            await leave(running[1])
        async with asyncio.timeout(LIMIT_S):
            found = await asyncio.gather(*(one.result() for one in running), return_exceptions=True)
        assert blamed(found) == ([1] if short else [0, 1])
        assert [type(one) for one in found] == [Result if short else EngineDead] + [EngineDead] * 3


@pytest.mark.parametrize("name", ["grow", "plan"])
async def test_an_error_in_planning_is_charged_to_all_that_the_plan_is_about(
    name: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model_folder, max_running=2) as engine:
        slow_down(engine, monkeypatch)
        running = [await engine.submit(request(prompt(40, seed=n), num_samples=2, max_tokens=200)) for n in range(3)]
        await until(lambda: metric(engine, "running_sequences") == 2 and len(engine.scheduler.groups) == 3)
        raising_once(getattr(Planner, name), monkeypatch, Planner, name)
        found = await asyncio.gather(*(one.result() for one in running), return_exceptions=True)
        assert blamed(found) == [0, 1, 2]


async def test_an_error_in_a_step_is_not_charged_to_those_that_wait(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model_folder, max_running=2) as engine:
        slow_down(engine, monkeypatch)
        running = [await engine.submit(request(prompt(40, seed=n), num_samples=2, max_tokens=200)) for n in range(3)]
        await until(lambda: metric(engine, "running_sequences") == 2)
        raising_once(Runner.logits, monkeypatch, Runner, "logits")
        found = await asyncio.gather(*(one.result() for one in running), return_exceptions=True)
        assert blamed(found) == [0]


DEADLY = {
    "add": (Scheduler, "add"),
    "grow": (Planner, "grow"),
    "plan": (Planner, "plan"),
    "room": (KVCacheManager, "fit"),
    "load": (KVCacheManager, "load"),
    "forward": (Runner, "logits"),
    "draw": (runner, "draw"),
    "place": (KVCacheManager, "place"),
    "advance": (Scheduler, "_advance"),
    "leave": (Scheduler, "_leave"),
    "remember": (KVCacheManager, "remember"),
    "observe": (KVCacheManager, "observe"),
    "post": (TorchEngine, "_post"),
    "deliver": (TorchEngine, "_hand_over"),
    "let go": (SequenceGroup, "forget_versions"),
}


@pytest.mark.parametrize("phase", DEADLY)
async def test_an_error_of_several_requests_ends_the_engine_and_health_hears_of_it_first(
    phase: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model_folder) as engine:
        await engine.install("v", make_adapter(engine.targets, seed=1))
        pending_at_news: list[int] = []

        async def hear() -> None:
            pending_at_news.append(len(engine.requests))

        engine.requests.on_death = hear
        owner, name = DEADLY[phase]
        await generate(engine, prompt(4), max_tokens=1)  # now the compute thread has nothing left to post
        raising_once(getattr(owner, name), monkeypatch, owner, name)
        found = await outcomes(engine)
        dead = [one for one in found if isinstance(one, EngineDead)]
        # The gateway must learn of a request that may be the cause, unless that one has its answer. Else requests that
        # cause it would be sent to one sampler after the other.
        assert phase == "let go" or blamed(found)
        assert all(isinstance(one, Result | EngineDead) for one in found)
        assert dead
        assert pending_at_news[0] >= len(dead) - 1  # the one whose end has failed may have been taken off already
        assert engine.requests.died.is_set()
        assert not engine.requests
        assert len(engine.requests.waiting) == 0
        with pytest.raises(EngineDead):
            await engine.submit(request(prompt(4), max_tokens=3))


@pytest.mark.parametrize("name", ["let go", "leave", "admit"])
async def test_books_that_stay_wrong_after_the_engine_has_died_keep_no_request_waiting(
    name: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`admit`: of requests that begin in the step that fails."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("no such luck, ever")

    async with serving(model_folder) as engine:
        if name == "admit":
            monkeypatch.setattr(OpenRequests, "admit", fail)
            monkeypatch.setattr(Runner, "logits", fail)
        else:
            owner, method = {"let go": (SequenceGroup, "forget_versions"), "leave": (Room, "leave")}[name]
            monkeypatch.setattr(owner, method, fail)
        running = [await engine.submit(request(prompt(20, seed=n), num_samples=2, max_tokens=20)) for n in range(4)]
        async with asyncio.timeout(LIMIT_S):
            found = await asyncio.gather(*(one.result() for one in running), return_exceptions=True)
        assert any(isinstance(one, EngineDead) for one in found)
        assert all(isinstance(one, Result | EngineDead) for one in found)
        assert engine.requests.died.is_set()


async def test_a_compute_thread_that_ends_before_its_loop_ends_the_engine(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr("sampler_service.torch_engine.engine.yield_to_event_loops", fail)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineDead):
            async with serving(model_folder):
                pass


@pytest.mark.parametrize("name", ["cancel", "move", "forget_version"])
async def test_an_order_that_fails_ends_the_engine_and_every_wait(
    name: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model_folder) as engine:
        for n in (1, 2):
            await engine.install(f"r@{n}", make_adapter(engine.targets, seed=n))
        generation = await engine.submit(request(prompt(6), version_id="r@1", follow_run="r", max_tokens=240))
        await until(lambda: metric(engine, "running_sequences") == 1)
        raising_once(getattr(Scheduler, name), monkeypatch, Scheduler, name)
        async with asyncio.timeout(LIMIT_S):
            if name == "cancel":
                await leave(generation)
            elif name == "forget_version":
                await engine.install("r@3", make_adapter(engine.targets, seed=3))
                engine.store.remove("r@3")
            else:
                with pytest.raises(EngineDead):
                    await engine.move("r", "r@2")
            with pytest.raises(EngineDead):
                await generation.result()
        assert engine.requests.died.is_set()


async def test_a_request_that_cannot_be_divided_into_jobs_leaves_nothing_behind(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model_folder) as engine:
        await engine.install("v", make_adapter(engine.targets, seed=1))
        for owner, name in ((TorchEngine, "_jobs"), (PromptScorer, "__init__")):
            raising_once(getattr(owner, name), monkeypatch, owner, name)
            with pytest.raises((ServiceError, ValueError), match="no such luck"):
                await engine.submit(request(prompt(4), version_id="v", max_tokens=3, prompt_logprobs=True))
        check_nothing_left(engine)
        assert engine.store.versions()[0].num_running == 0
        assert not engine.requests.died.is_set()


def steps_wait_for(num_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engine compute nothing until it has so many requests."""
    true_add, true_is_held = Scheduler.add, vars(Scheduler)["is_held"].fget
    num_added = 0

    def add(scheduler: Scheduler, jobs: Any) -> None:
        nonlocal num_added
        true_add(scheduler, jobs)
        num_added += 1

    monkeypatch.setattr(Scheduler, "add", add)
    is_held = property(lambda scheduler: num_added < num_requests or true_is_held(scheduler))
    monkeypatch.setattr(Scheduler, "is_held", is_held)


SHORT_OF_MEMORY = {
    name: DEADLY[name] for name in ("room", "load", "forward", "draw", "place", "remember", "advance", "leave")
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("phase", SHORT_OF_MEMORY)
async def test_what_was_in_a_step_without_memory_is_computed_again_and_comes_out_the_same(
    phase: str, when: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await expected_outcomes(model_folder)
    async with serving(model_folder) as engine:
        steps_wait_for(len(expected), monkeypatch)  # one request alone in a step without memory would be refused
        owner, name = SHORT_OF_MEMORY[phase]
        true_function, num_calls = getattr(owner, name), 0

        def fail(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls not in (1, 4):
                return true_function(*args, **kwargs)
            if when == "after":
                true_function(*args, **kwargs)
            raise torch.OutOfMemoryError("full")

        monkeypatch.setattr(owner, name, fail)
        found = await outcomes(engine)
        assert num_calls > 4
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, Result)
            assert isinstance(other, Result)
            assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
            for a, b in zip(one.sequences, other.sequences, strict=True):
                np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-5)
                assert a.topk is not None
                assert b.topk is not None
                np.testing.assert_array_equal(a.topk.token_ids, b.topk.token_ids)
            assert one.prompt.logprobs is not None
            assert other.prompt.logprobs is not None
            np.testing.assert_allclose(one.prompt.logprobs, other.prompt.logprobs, rtol=1e-4, atol=1e-5)
        assert not engine.requests.died.is_set()
        check_nothing_left(engine)


@pytest.mark.parametrize("num_samples", [1, 6])
async def test_a_request_without_memory_for_it_alone_fails_by_name_and_no_other_does(
    num_samples: int, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [request(prompt(40, seed=n), num_samples=num_samples, max_tokens=12, seed=n) for n in range(9)]
    async with serving(model_folder) as engine:
        expected = [await (await engine.submit(one)).result() for one in asked]
    async with serving(model_folder) as engine:
        true_function = Runner.logits

        def fail(runner: Runner, batch: Batch) -> Any:
            in_step = [*batch.running, *(one for piece in batch.pieces for one in piece.job.sequences)]
            if any(one.group.request.prompt[0] == MARK for one in in_step):
                raise torch.OutOfMemoryError("full")
            return true_function(runner, batch)

        monkeypatch.setattr(Runner, "logits", fail)
        guilty = prompt(40, seed=4)
        guilty[0] = MARK
        asked.insert(4, request(guilty, num_samples=num_samples, max_tokens=12))
        running = [await engine.submit(one) for one in asked]
        async with asyncio.timeout(LIMIT_S):
            found = await asyncio.gather(*(one.result() for one in running), return_exceptions=True)
        error = found.pop(4)
        assert isinstance(error, ServiceError)
        assert not isinstance(error, OutOfCapacity), "it would be sent again for ever"
        assert "this request is out of memory, although nothing is computed beside" in error.message
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, Result)
            assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        assert not engine.requests.died.is_set()
        check_nothing_left(engine)
        assert engine.scheduler.planner.most_together is None


async def test_the_sequences_beside_each_other_grow_again_after_good_steps(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model_folder) as engine:
        true_function, most = Runner.logits, 0

        def fail(runner: Runner, batch: Batch) -> Any:
            nonlocal most
            if len(batch.running) > 3:
                raise torch.OutOfMemoryError("full")
            most = max(most, len(batch.running))
            return true_function(runner, batch)

        monkeypatch.setattr(Runner, "logits", fail)
        running = [await engine.submit(request(prompt(20, seed=n), max_tokens=100)) for n in range(8)]
        async with asyncio.timeout(LIMIT_S):
            for one in running:
                await one.result()
        assert 2 <= most <= 3
        planner = engine.scheduler.planner
        while planner.most_together is not None:
            await generate(engine, prompt(4), max_tokens=64)
        check_nothing_left(engine)
