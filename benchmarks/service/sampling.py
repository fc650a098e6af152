"""Sampling, and the way of new weights to their first token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from benchmarks.figure import Aim, Figure
from benchmarks.processes import Baseline
from benchmarks.rounds import ms
from benchmarks.service.bench import ServiceBench, forward, publish, sample, train_step


def sampling(bench: ServiceBench) -> Iterator[Figure]:
    """Generation from a published adapter, with new prompts each time, so that no prefix cache helps."""
    sampler = publish(bench.trainer)

    def tokens_per_s() -> float:
        prompts = [bench.prompt(64) for _ in range(8)]
        begin = time.perf_counter()
        return sample(sampler, prompts, samples=8, tokens=64) / (time.perf_counter() - begin)

    def latency_ms(prompt_length: int, tokens: int) -> float:
        prompt = bench.prompt(prompt_length)
        return ms(lambda: sample(sampler, [prompt], samples=1, tokens=tokens))

    def hf_seconds(hf: Baseline, **shape: int) -> float:
        return hf.seconds(do="generate", prompt_tokens=64, threads=bench.loop_threads, **shape)

    yield bench.against_hf(
        "sample, 8 prompts x 8 samples, 64+64",
        "tokens/s",
        tokens_per_s,
        lambda hf: 8 * 8 * 64 / hf_seconds(hf, prompts=8, samples=8, new_tokens=64),
        loop="PEFT generate()",
        aims=[Aim(1.8, model="small")],
    )
    yield bench.against_hf(
        "one sample, 64+32",
        "ms",
        lambda: latency_ms(64, 32),
        lambda hf: 1e3 * hf_seconds(hf, prompts=1, samples=1, new_tokens=32),
        loop="PEFT generate()",
    )
    http, first_token = bench.latencies(bench.healthz_ms, lambda: latency_ms(8, 1))
    yield Figure("one sample, 8+1", "ms", first_token, "HTTP GET healthz", http)


def publishing(bench: ServiceBench) -> Iterator[Figure]:
    """From a finished optim_step to a new sampling client, and to a token from it."""
    tiny, prompt = bench.batch([8]), bench.prompt(8)

    def with_new_weights(work: Callable[[], object]) -> float:
        train_step(bench.trainer, tiny)
        return ms(work)

    trivial, alone, first_token = bench.rounds(
        lambda: ms(lambda: forward(bench.trainer, tiny)),
        lambda: with_new_weights(lambda: publish(bench.trainer)),
        lambda: with_new_weights(lambda: sample(publish(bench.trainer), [prompt], samples=1, tokens=1)),
        repeats=2 * bench.repeats,
    )
    yield Figure("publish", "ms", alone, "forward of 8 tokens", trivial)
    yield Figure(
        "publish to first token",
        "ms",
        first_token,
        "forward of 8 tokens",
        trivial,
        aims=[Aim(60, "ms", at_most=True, model="small"), Aim(150, "ms", at_most=True, model="medium")],
    )
