"""Full versions of base models, each in vLLM with Tinsmith's worker, without a service around it. Runs in vLLM's own
environment: python -m tests.vllm.shapes FOLDER, which has for each model a folder `base`, the version's buffer, and the
prompt; it prints {model: {"refused": why, or "", "logprobs": [of the base model, of the version, of the base model]}}.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from sampler_service.config import SamplerConfig
from sampler_service.core.request import Request
from sampler_service.core.scoring import PromptScorer
from sampler_service.vllm.reference import _measure
from sampler_service.vllm.settings import engine_args, set_environment
from sampler_service.vllm.shared_memory import SharedTensor
from sampler_service.vllm.wire import Draws, Scores, extra_args


def served(folder: Path) -> dict[str, Any]:
    config = SamplerConfig(
        base_model=str(folder / "base"), device="cpu", num_threads=1, max_kv_tokens=256, prefix_cache_bytes=0,
        max_lora_rank=8,
    )  # fmt: skip
    reference = _measure(config)
    set_environment(config, device="cpu")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    args = engine_args(config, reference)
    del args["enable_log_requests"]
    llm = LLM(**args)
    llm.collective_rpc("tinsmith_set_up")
    shared = SharedTensor.copy_of(load_file(folder / "version.safetensors")["flat"])
    parameters = reference.parameters
    specs = [(name, list(shape), name in parameters.by_columns) for name, shape in parameters.shapes.items()]
    (refused,) = llm.collective_rpc("tinsmith_register_full", args=(1, astuple(shared.handle), specs))
    tokens = json.loads((folder / "tokens.json").read_text())
    numbers = [0] if refused else [0, 1, 0]
    logprobs = [scored(llm, tokens, number) for number in numbers]
    del llm
    cleanup_dist_env_and_memory()
    return {"refused": refused, "logprobs": logprobs}


def scored(llm: Any, tokens: list[int], number: int) -> list[float]:
    """log P of each token but the first, with the base weights of this number."""
    from vllm import SamplingParams

    request = Request(np.array(tokens, np.int32), prompt_logprobs=True)
    draws = Draws(key=1, first=0, temperature=1.0, top_k=-1, top_p=1.0, topk=0)
    args = extra_args(draws, Scores.of(request, name="scores", seed=0), base_weights=number)
    params = SamplingParams(max_tokens=1, logprobs=0, flat_logprobs=True, detokenize=False, extra_args=args)
    llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
    scorer = PromptScorer(request, seed=0)
    scorer.restore(llm.collective_rpc("tinsmith_take_scores", args=("scores",))[0])
    return scorer.logprobs[1:].tolist()


def main(root: str) -> None:
    folders = sorted(Path(root).iterdir())
    print(json.dumps({folder.name: served(folder) for folder in folders}), flush=True)


if __name__ == "__main__":
    # The engine ends with the process that has started its own.
    process = multiprocessing.get_context("spawn").Process(target=main, args=(sys.argv[1],))
    process.start()
    process.join()
    sys.exit(process.exitcode)
