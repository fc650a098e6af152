"""vLLM alone, offline and in process: a subprocess of sampler.py, under an interpreter that has vLLM.

    python -m benchmarks.vllm_baseline MODEL_FOLDER

Requests and answers are those of hf_baseline.py's "generate" and "serve", without "threads" (OMP_NUM_THREADS says it).
The settings are the best that were found on a CPU: blocks of 32 tokens, so that the samples of a short prompt share
most of its prefill; no compilation, which gains some percent there and costs minutes; logprobs of what is sampled.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

CUDA_ONLY = {"dtype": "bfloat16"}
CPU_ONLY = {"dtype": "float32", "block_size": 32, "enforce_eager": True}
random = np.random.default_rng(0)


def load_engine(folder: str) -> Any:
    import torch
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    where = CUDA_ONLY if torch.cuda.is_available() else CPU_ONLY
    return LLM(model=folder, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=4096, seed=0, **where)


def request(llm: Any, *, prompt_tokens: int, new_tokens: int, samples: int) -> tuple[Any, Any]:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    params = SamplingParams(
        n=samples, temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    return {"prompt_token_ids": random.integers(vocab_size, size=prompt_tokens).tolist()}, params


def generate(llm: Any, *, prompts: int, samples: int, prompt_tokens: int, new_tokens: int) -> list[float]:
    asked = [request(llm, prompt_tokens=prompt_tokens, new_tokens=new_tokens, samples=samples) for _ in range(prompts)]
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
    made = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
    if made != prompts * samples * new_tokens:
        raise RuntimeError(f"vLLM gave {made} tokens, not {prompts * samples * new_tokens}")
    return []


def serve(llm: Any, *, load: Sequence[tuple[float, int, int]]) -> list[float]:
    engine = llm.llm_engine
    begin, waiting, latencies = time.perf_counter(), list(enumerate(load)), {}
    while waiting or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, begin + waiting[0][1][0] - time.perf_counter()))
        while waiting and waiting[0][1][0] <= time.perf_counter() - begin:
            index, (_, prompt_tokens, new_tokens) = waiting.pop(0)
            prompt, params = request(llm, prompt_tokens=prompt_tokens, new_tokens=new_tokens, samples=1)
            engine.add_request(f"{begin}-{index}", prompt, params)
        for output in engine.step():
            if output.finished:
                index = int(output.request_id.rpartition("-")[2])
                latencies[index] = time.perf_counter() - begin - load[index][0]
    return [latencies[index] for index in range(len(load))]


def main(folder: str, answers: Any) -> None:
    llm = load_engine(folder)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        work = {"generate": generate, "serve": serve}[asked.pop("do")]
        begin = time.perf_counter()
        latencies = work(llm, **asked)
        print(json.dumps({"seconds": time.perf_counter() - begin, "latencies": latencies}), file=answers, flush=True)


if __name__ == "__main__":
    # vLLM writes to the descriptor itself, so the answers get one of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.argv[1], answers)
