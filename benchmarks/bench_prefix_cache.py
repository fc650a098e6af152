"""Measures the savings of the prefix cache, and its cost if prompts share nothing: the torch engine with and without
it.

    python benchmarks/bench_prefix_cache.py --size small

Two engines in one process work in turn, round by round, and on a CPU it is the process's own CPU time that counts, so
that the ratios hold on a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from sampler_service.config import SamplerConfig
from sampler_service.core.request import Params, Request, Result, StopCondition
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.engine import TorchEngine
from tinsmith.toy.model import SHAPES, Recipe, make

PROMPT_TOKENS = 1024
TURNS, TURN_TOKENS, ANSWER_TOKENS = 6, 256, 32

random = np.random.default_rng(0)


def tokens(count: int) -> np.ndarray:
    return random.integers(1000, size=count).astype(np.int32)


async def generate(engine: TorchEngine, prompt: np.ndarray, *, max_tokens: int, num_samples: int = 1) -> Result:
    params = Params(max_tokens=max_tokens, seed=0, stop=StopCondition())
    return await (await engine.submit(Request(prompt, num_samples=num_samples, params=params))).result()


def same_prompt() -> Callable[[TorchEngine], Awaitable[object]]:
    """One token after a prompt that is cached except for its last 16 tokens."""
    prompt = tokens(PROMPT_TOKENS)

    async def work(engine: TorchEngine) -> None:
        await generate(engine, np.concatenate([prompt[:-16], tokens(16)]), max_tokens=1)

    return work


def conversation() -> Callable[[TorchEngine], Awaitable[object]]:
    """A conversation: each turn's prompt consists of all earlier turns and some new tokens."""

    async def work(engine: TorchEngine) -> None:
        said = np.zeros(0, np.int32)
        for _ in range(TURNS):
            said = np.concatenate([said, tokens(TURN_TOKENS)])
            answer = (await generate(engine, said, max_tokens=ANSWER_TOKENS)).sequences[0]
            said = np.concatenate([said, np.array(answer.tokens, np.int32)])

    return work


def nothing_shared() -> Callable[[TorchEngine], Awaitable[object]]:
    """8 new prompts x 8 samples, 64+64: every hit is missed, and every block is written."""

    async def work(engine: TorchEngine) -> None:
        await asyncio.gather(*[generate(engine, tokens(64), max_tokens=64, num_samples=8) for _ in range(8)])

    return work


def decoding() -> Callable[[TorchEngine], Awaitable[object]]:
    """64 sequences of 128 tokens from a prompt of one token: only decode steps, and the blocks that they leave."""

    async def work(engine: TorchEngine) -> None:
        await generate(engine, tokens(1), max_tokens=128, num_samples=64)

    return work


WORKLOADS = {
    f"a prompt of {PROMPT_TOKENS}, all but its end seen before": same_prompt,
    f"a conversation of {TURNS} turns, {TURN_TOKENS}+{ANSWER_TOKENS} each": conversation,
    "8 new prompts x 8 samples, 64+64": nothing_shared,
    "64 sequences, 1+128": decoding,
}


async def timed(work: Callable[[TorchEngine], Awaitable[object]], engine: TorchEngine) -> float:
    clock = time.process_time if engine.device == "cpu" else time.perf_counter
    started = clock()
    await work(engine)
    return clock() - started


async def main(folder: Path, *, repeats: int, threads: int) -> None:
    without, with_cache = [
        await TorchEngine.load(
            SamplerConfig(base_model=str(folder), num_threads=threads, prefix_cache_bytes=size),
            SamplerMetrics(CollectorRegistry()),
        )
        for size in (0, None)
    ]
    print("| work | without | with | ratio, round by round |\n|---|---|---|---|")
    for name, workload in WORKLOADS.items():
        work = workload()
        for engine in (without, with_cache):
            await work(engine)
        pairs = [(await timed(work, without), await timed(work, with_cache)) for _ in range(repeats)]
        ratios = [one / other for one, other in pairs]
        off, on, ratio = (statistics.median(values) for values in (*zip(*pairs, strict=True), ratios))
        spread = f"{ratio:.3g} [{min(ratios):.3g}-{max(ratios):.3g}]"
        print(f"| {name} | {off:.3g} s | {on:.3g} s | {spread} x |", flush=True)
    for engine in (without, with_cache):
        await engine.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine")
    arguments = parser.parse_args()
    folder = Path.home() / ".cache" / "tinsmith-bench" / arguments.size
    make(Recipe(arguments.size), folder, report=print)
    asyncio.run(main(folder, repeats=arguments.repeats, threads=arguments.threads))
