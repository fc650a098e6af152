"""Many clients, or many requests of one, at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import tinker
from figure import Figure
from tinker import types

from service.bench import Bench, publish

NUM_SAMPLES = 1000
NUM_SESSIONS = 100


def many_samples(bench: Bench) -> Iterator[Figure]:
    """A thousand samples of one client, submitted at once: how long the slowest hundredth waits."""
    sampler = publish(bench.trainer)
    prompts = [bench.prompt(16) for _ in range(NUM_SAMPLES)]
    params = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])

    async def one(prompt: types.ModelInput) -> float:
        begin = time.perf_counter()
        await sampler.sample_async(prompt, 1, params)
        return time.perf_counter() - begin

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    (slowest,) = bench.rounds(lambda: _p99(asyncio.run(all_of_them())), repeats=min(bench.repeats, 5))
    yield Figure(f"{NUM_SAMPLES} samples at once, 16+8: p99", "s", slowest, aim="tiny: under 5 s")


def many_sessions(bench: Bench) -> Iterator[Figure]:
    """A hundred sessions, each with a model, opened at once: how long the slowest hundredth waits for its model."""
    base_model = bench.target.base_model
    login = {"base_url": bench.target.url, "api_key": bench.api_key}

    clients: list[tinker.ServiceClient] = []  # never closed: docs/api.md (the SDK's transport) says why some would hang

    def one(_: int) -> float:
        begin = time.perf_counter()
        service = tinker.ServiceClient(**login)
        clients.append(service)
        service.create_lora_training_client(base_model, rank=8).result()
        return time.perf_counter() - begin

    with ThreadPoolExecutor(NUM_SESSIONS) as threads:
        (slowest,) = bench.rounds(
            lambda: _p99(list(threads.map(one, range(NUM_SESSIONS)))), repeats=min(bench.repeats, 3)
        )
    yield Figure(f"{NUM_SESSIONS} sessions with a model at once: p99", "s", slowest, aim="tiny: under 6 s")


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]
