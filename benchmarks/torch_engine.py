"""Measures the torch engine in this process: no service, no wire.

    python -m benchmarks torch_engine --size small

Engines with and without what is measured work in turn, round by round, and on a CPU it is the process's own CPU time
that counts, so that the ratios hold on a machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.command_line import SIZES, add_models, add_only, add_rounds, add_size
from benchmarks.figure import Aim, Figure, Report
from benchmarks.model_work import multiplies_bfloat16
from benchmarks.processes import model_folder
from benchmarks.rounds import MIN_ROUNDS
from benchmarks.trainer.shapes import MODEL_SHAPES
from sampler_service.config import SamplerConfig
from sampler_service.core.request import Params, Request, Result, StopCondition
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine import runner
from sampler_service.torch_engine.engine import TorchEngine
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.self_check import random_adapter
from trainer_service.engine.engine import TrainingEngine
from trainer_service.weight_sync.canary import canary

PROMPT_TOKENS = 1024
TURNS, TURN_TOKENS, ANSWER_TOKENS = 6, 256, 32
DECODED = 32
"""Decode steps of a figure."""
SCORED = 8
"""Sequences on which trainer and sampler are compared."""
GAP_NATS = 5e-3
"""Most that their logprobs may differ in bfloat16, on average."""

Work = Callable[[TorchEngine], Awaitable[object]]

random = np.random.default_rng(0)


def tokens(count: int) -> np.ndarray:
    return random.integers(1000, size=count).astype(np.int32)


async def generate(
    engine: TorchEngine, prompt: np.ndarray, *, max_tokens: int, num_samples: int = 1, version_id: str = ""
) -> Result:
    params = Params(max_tokens=max_tokens, seed=0, stop=StopCondition())
    return await (await engine.submit(Request(prompt, version_id, num_samples=num_samples, params=params))).result()


def same_prompt() -> Work:
    """One token after a prompt that is cached except for its last 16 tokens."""
    prompt = tokens(PROMPT_TOKENS)

    async def work(engine: TorchEngine) -> None:
        await generate(engine, np.concatenate([prompt[:-16], tokens(16)]), max_tokens=1)

    return work


def conversation() -> Work:
    """A conversation: each turn's prompt consists of all earlier turns and some new tokens."""

    async def work(engine: TorchEngine) -> None:
        said = np.zeros(0, np.int32)
        for _ in range(TURNS):
            said = np.concatenate([said, tokens(TURN_TOKENS)])
            answer = (await generate(engine, said, max_tokens=ANSWER_TOKENS)).sequences[0]
            said = np.concatenate([said, np.array(answer.tokens, np.int32)])

    return work


def nothing_shared() -> Work:
    """8 new prompts x 8 samples, 64+64: every hit is missed, and every block is written."""

    async def work(engine: TorchEngine) -> None:
        await asyncio.gather(*[generate(engine, tokens(64), max_tokens=64, num_samples=8) for _ in range(8)])

    return work


def decoding() -> Work:
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


async def prefix_cache(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Figure]:
    """The time that the prefix cache saves, and its cost where prompts share nothing."""
    engines = [await _load(folder, arguments, prefix_cache_bytes=size) for size in (None, 0)]
    for name, workload in WORKLOADS.items():
        work = workload()
        with_cache, without = await _alternate(
            [lambda engine=engine, work=work: _seconds(work, engine) for engine in engines], arguments
        )
        yield Figure(name, "s", with_cache, "without the prefix cache", without)
    for engine in engines:
        await engine.stop()


async def bfloat16(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Figure]:
    """A decode step of 8 and of 64 sequences with base weights in bfloat16; and the gap between trainer and sampler."""
    engines = [await _load(folder, arguments, dtype=dtype) for dtype in ("bfloat16", "float32")]
    aims = [Aim(1.8, model="medium")] if multiplies_bfloat16() else []
    for num_prompts in (1, 8):

        def rate(engine: TorchEngine, num_prompts: int = num_prompts) -> Awaitable[float]:
            return _decode_rate(engine, num_prompts=num_prompts, num_samples=8)

        narrow, wide = await _alternate([lambda engine=engine: rate(engine) for engine in engines], arguments)
        name = f"decode steps of {8 * num_prompts} in bfloat16"
        yield Figure(name, "tokens/s", narrow, "float32", wide, aims)
    for engine in engines[1:]:
        await engine.stop()
    gaps = await _gaps(folder, engines[0])
    mean = Figure("mean gap of trainer and sampler in bfloat16", "nats", [float(gaps.mean())], aims=[_gap_aim()])
    for figure in (mean, Figure("largest gap in bfloat16", "nats", [float(gaps.max())])):
        yield figure
    await engines[0].stop()


async def cuda_graphs(folder: Path, arguments: argparse.Namespace) -> AsyncIterator[Figure]:
    """Decode steps of an adapter that are captured in CUDA graphs, against steps that the host starts one operation at
    a time. None on a CPU."""
    if not torch.cuda.is_available():
        return
    engines = [await _load(folder, arguments)]
    with patch.object(runner, "why_no_graphs", lambda _: "to be compared"):
        engines.append(await _load(folder, arguments))
    for engine in engines:
        await engine.install("v1", random_adapter(AdapterConfig(rank=32, seed=0), engine.targets, engine.base.device))
    for num_prompts, num_samples in ((1, 1), (1, 8), (8, 8)):

        def rate(
            engine: TorchEngine, num_prompts: int = num_prompts, num_samples: int = num_samples
        ) -> Awaitable[float]:
            return _decode_rate(engine, num_prompts=num_prompts, num_samples=num_samples, version_id="v1")

        captured, started = await _alternate([lambda engine=engine: rate(engine) for engine in engines], arguments)
        name = f"decode steps of {num_prompts * num_samples} as CUDA graphs"
        yield Figure(name, "tokens/s", captured, "started one by one", started)
    for engine in engines:
        await engine.stop()


async def _decode_rate(engine: TorchEngine, *, num_prompts: int, num_samples: int, version_id: str = "") -> float:
    """Tokens of all sequences per second of decode steps: the work of DECODED + 1 steps less that of one."""
    prompts = [tokens(64) for _ in range(num_prompts)]

    def work(steps: int) -> Work:
        return lambda engine: asyncio.gather(
            *(
                generate(engine, prompt, max_tokens=steps, num_samples=num_samples, version_id=version_id)
                for prompt in prompts
            )
        )

    await work(1)(engine)  # now the prompts are in the prefix cache
    first, all_steps = await _seconds(work(1), engine), await _seconds(work(DECODED + 1), engine)
    return num_samples * num_prompts * DECODED / (all_steps - first)


def _gap_aim() -> Aim:
    return Aim(GAP_NATS, "nats", at_most=True)


async def _gaps(folder: Path, engine: TorchEngine) -> np.ndarray:
    """How far the logprobs of each token are apart, of an adapter that changes the model."""
    base = BaseModel.load(folder, device=engine.base.device, dtype=engine.base.dtype)
    adapter = random_adapter(AdapterConfig(rank=16, seed=0), base.targets, base.device)
    sequences = canary(SCORED, vocab_size=base.vocab_size, max_context_length=base.max_context_length)
    trained = TrainingEngine(base, max_tokens_per_microbatch=4096).score(adapter, sequences)
    await engine.install("v1", adapter)
    params = Params(max_tokens=1, stop=StopCondition())
    requests = [Request(one, "v1", params=params, prompt_logprobs=True) for one in sequences]
    results = [await (await engine.submit(request)).result() for request in requests]
    sampled = np.concatenate([np.asarray(result.prompt.logprobs)[1:] for result in results])
    return np.abs(trained.astype(np.float64) - sampled.astype(np.float64))


FIGURES: dict[str, Callable[[Path, argparse.Namespace], AsyncIterator[Figure]]] = {
    "prefix_cache": prefix_cache,
    "bfloat16": bfloat16,
    "cuda_graphs": cuda_graphs,
}


async def _load(folder: Path, arguments: argparse.Namespace, **settings: Any) -> TorchEngine:
    config = {"base_model": str(folder), "num_threads": arguments.threads, **settings}
    return await TorchEngine.load(SamplerConfig.model_validate(config), SamplerMetrics(CollectorRegistry()))


async def _seconds(work: Work, engine: TorchEngine) -> float:
    clock = time.process_time if engine.device == "cpu" else time.perf_counter
    begin = clock()
    await work(engine)
    return clock() - begin


async def _alternate(
    runs: Sequence[Callable[[], Awaitable[float]]], arguments: argparse.Namespace
) -> list[list[float]]:
    """As rounds.alternate, of coroutines."""
    for run in runs:
        await run()
    begin, rows = time.perf_counter(), []
    least = min(MIN_ROUNDS, arguments.repeats)
    while len(rows) < least or (len(rows) < arguments.repeats and time.perf_counter() - begin < arguments.budget_s):
        rows.append([await run() for run in runs])
    return [list(column) for column in zip(*rows, strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size(parser, default="small", sizes=(*SIZES, *MODEL_SHAPES))
    add_models(parser)
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine (%(default)s)")
    add_rounds(parser, repeats=9, budget_s=60.0)
    add_only(parser, FIGURES)


def run(arguments: argparse.Namespace, report: Report) -> None:
    folder = model_folder(arguments.size, arguments.models)
    torch.set_num_threads(arguments.threads)
    asyncio.run(_measure(folder, arguments, report))


async def _measure(folder: Path, arguments: argparse.Namespace, report: Report) -> None:
    for name in arguments.only:
        async for figure in FIGURES[name](folder, arguments):
            report.add(figure)
