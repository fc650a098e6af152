"""Many clients, or many requests of one, at once. Compared, in turns, with the SDK by itself against canned.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import tinker
from tinker import types

from benchmarks.canned import stand_in
from benchmarks.figure import Aim, Figure
from benchmarks.service.bench import ServiceBench, publish, sample

NUM_SAMPLES = 1000
NUM_SESSIONS = 100


def many_samples(bench: ServiceBench) -> Iterator[Figure]:
    """A thousand samples of one client, submitted at once: how long the slowest hundredth waits."""
    prompts = [bench.prompt(16) for _ in range(NUM_SAMPLES)]
    params = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])

    async def one(sampler: tinker.SamplingClient, prompt: types.ModelInput) -> float:
        begin = time.perf_counter()
        await sampler.sample(prompt, 1, params)
        return time.perf_counter() - begin

    async def all_of(sampler: tinker.SamplingClient) -> list[float]:
        return await asyncio.gather(*(one(sampler, prompt) for prompt in prompts))

    def connected(url: str) -> Callable[[], float]:
        service = tinker.ServiceClient(base_url=url, api_key=bench.api_key)
        sampler = service.create_sampling_client(base_model=bench.target.base_model).result()
        sample(sampler, prompts[:1], samples=1, tokens=8)  # the stand-in asks now
        return lambda: _p99(asyncio.run(all_of(sampler)))

    sampler = publish(bench.trainer)
    with _alone(bench, connected) as alone:
        yield from _figures(
            bench,
            f"{NUM_SAMPLES} samples at once, 16+8: p99",
            lambda: _p99(asyncio.run(all_of(sampler))),
            alone,
            repeats=5,
            aim=Aim(5, "s", at_most=True, model="tiny"),
        )


def many_sessions(bench: ServiceBench) -> Iterator[Figure]:
    """A hundred sessions, each with a model, opened at once: how long the slowest hundredth waits for its model."""
    clients: list[tinker.ServiceClient] = []  # never closed: docs/api.md (the SDK's transport) says why some would hang

    def one(url: str) -> float:
        begin = time.perf_counter()
        service = tinker.ServiceClient(base_url=url, api_key=bench.api_key)
        clients.append(service)
        service.create_lora_training_client(bench.target.base_model, rank=8).result()
        return time.perf_counter() - begin

    def connected(url: str) -> Callable[[], float]:
        one(url)  # the stand-in asks now
        return lambda: _p99(list(threads.map(one, [url] * NUM_SESSIONS)))

    with ThreadPoolExecutor(NUM_SESSIONS) as threads, _alone(bench, connected) as alone:
        yield from _figures(
            bench,
            f"{NUM_SESSIONS} sessions with a model at once: p99",
            connected(bench.target.url),
            alone,
            repeats=3,
            aim=Aim(6, "s", at_most=True, model="tiny"),
        )


@contextmanager
def _alone(
    bench: ServiceBench, connected: Callable[[str], Callable[[], float]]
) -> Iterator[Callable[[], float] | None]:
    """The baseline against the stand-in; None for a server elsewhere, which may need TLS."""
    if bench.target.up is None:
        yield None
        return
    with stand_in(bench.target.url) as (url, _):
        yield connected(url)


def _figures(
    bench: ServiceBench,
    name: str,
    run: Callable[[], float],
    alone: Callable[[], float] | None,
    *,
    repeats: int,
    aim: Aim,
) -> Iterator[Figure]:
    repeats = min(bench.repeats, repeats)
    if alone is None:
        (values,) = bench.rounds(run, repeats=repeats)
        yield Figure(name, "s", values, aims=[aim])
        return
    floor, values = bench.rounds(alone, run, repeats=repeats)
    yield Figure(name, "s", values, "the SDK by itself", floor, aims=[aim])
    added = [value - base for value, base in zip(values, floor, strict=True)]
    yield Figure(f"{name}, added by the service", "s", added)


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]
