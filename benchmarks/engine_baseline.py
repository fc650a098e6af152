"""The torch engine alone, without gateway, gRPC and SDK: a subprocess of sampler.py.

    python -m benchmarks.engine_baseline MODEL_FOLDER THREADS

It prints {} once the model is loaded; from then on each line of stdin is a request in JSON, and each line of stdout its
answer: those of hf_baseline.py's "generate" and "serve", without "threads"; and "step", which has the parts of a decode
step measured alone (step_parts.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.step_parts import step_parts
from sampler_service.config import SamplerConfig
from sampler_service.core.request import Grammar, Params, Request, StopCondition
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.engine import TorchEngine
from tinsmith.allocator import keep_freed_memory

random = np.random.default_rng(0)


JSON_TEXT = Grammar("json_schema", '{"type": "string", "minLength": 4096}')
"""A text that does not end before `max_tokens`."""


async def sample(
    engine: TorchEngine, *, prompt_tokens: int, new_tokens: int, samples: int, grammar: Grammar | None = None
) -> None:
    prompt = random.integers(engine.base.vocab_size, size=prompt_tokens).astype(np.int32)
    params = Params(max_tokens=new_tokens, stop=StopCondition())
    await (await engine.submit(Request(prompt, num_samples=samples, params=params, grammar=grammar))).result()


async def generate(
    engine: TorchEngine, *, prompts: int, samples: int, prompt_tokens: int, new_tokens: int, structured: int = 0
) -> list[float]:
    """`structured`: number of the prompts whose outputs have a grammar."""
    shape = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "samples": samples}
    grammars = [JSON_TEXT if n < structured else None for n in range(prompts)]
    await asyncio.gather(*(sample(engine, **shape, grammar=grammar) for grammar in grammars))
    return []


async def serve(engine: TorchEngine, *, load: Sequence[tuple[float, int, int]]) -> list[float]:
    begin = time.perf_counter()

    async def one(at_s: float, prompt_tokens: int, new_tokens: int) -> float:
        await asyncio.sleep(at_s)
        await sample(engine, prompt_tokens=prompt_tokens, new_tokens=new_tokens, samples=1)
        return time.perf_counter() - begin - at_s

    return await asyncio.gather(*(one(*request) for request in load))


async def main(folder: str, num_threads: int, answers: Any) -> None:
    keep_freed_memory()
    config = SamplerConfig(base_model=folder, num_threads=num_threads)
    engine = await TorchEngine.load(config, SamplerMetrics(CollectorRegistry()))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "step":
            print(json.dumps({"seconds": 0.0, "parts": step_parts(engine.base)}), file=answers, flush=True)
            continue
        work = {"generate": generate, "serve": serve}[request.pop("do")]
        begin = time.perf_counter()
        latencies = await work(engine, **request)
        print(json.dumps({"seconds": time.perf_counter() - begin, "latencies": latencies}), file=answers, flush=True)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), answers))
