"""Models that see pictures, each in vLLM with Tinsmith's worker, without a service around it, against Tinsmith's own
model. Runs in vLLM's own environment: python -m tests.vllm.families FOLDER, which has a folder for each model, and the
pictures; it prints {model: what `compared` returns}.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sampler_service.config import SamplerConfig
from sampler_service.core.request import Request
from sampler_service.core.scoring import PromptScorer
from sampler_service.vllm import reference
from sampler_service.vllm.outputs import drawn_tokens
from sampler_service.vllm.picture_inputs import PictureInfo
from sampler_service.vllm.pictures import picture_prompt
from sampler_service.vllm.settings import engine_args, set_environment
from sampler_service.vllm.shared_memory import SharedTensor
from sampler_service.vllm.versions import WorkerVersions
from sampler_service.vllm.wire import Draws, Scores, extra_args
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.self_check import random_adapter
from tinsmith.modeling.tower import PlacedPicture
from tinsmith.pictures.processing import Picture

ADAPTER = AdapterConfig(rank=4, train_unembed=False, seed=3)
"""vLLM's classes of these models take no adapter of the output layer."""


@dataclass(frozen=True)
class Prompt:
    tokens: np.ndarray
    placed: tuple[PlacedPicture, ...] = ()

    @classmethod
    def of(cls, *parts: Picture | int) -> Prompt:
        """Pictures, and texts of so many tokens."""
        tokens: list[np.ndarray] = []
        placed, start = [], 0
        for seed, part in enumerate(parts):
            if isinstance(part, Picture):
                placed.append(PlacedPicture(start, part))
                tokens.append(part.tokens)
            else:
                tokens.append(np.random.default_rng(seed).integers(10, 2000, part).astype(np.int32))
            start += len(tokens[-1])
        return cls(np.concatenate(tokens), tuple(placed))


class Vllm:
    """vLLM in this process."""

    def __init__(self, config: SamplerConfig, base: BaseModel, measured: reference.Reference) -> None:
        from vllm import LLM

        from sampler_service.vllm import patches

        args = engine_args(config, measured)
        del args["enable_log_requests"]
        patches.replace_picture_processor(PictureInfo)
        self.llm = LLM(**args)
        self.llm.collective_rpc("tinsmith_set_up")
        self.processor = base.tower.processor if base.tower else None
        adapter = random_adapter(ADAPTER, measured.targets, torch.device("cpu"))
        self.shared = SharedTensor.copy_of(adapter.flat)
        self.adapter = asyncio.run(WorkerVersions(self._call).register(adapter, self.shared))
        self._names = 0

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)

    def ask(self, prompt: Prompt, *, adapted: bool, keys: Sequence[int], scored: bool = False) -> list[Answer]:
        """Sequences of six tokens, drawn together by random streams with these keys."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        engine, number = self.llm.llm_engine, self.adapter.number
        tokens = prompt.tokens.tolist()
        numbers = []
        for one in prompt.placed:
            self._names += 1
            numbers.append(self._names)
            pixels = one.picture.pixels
            self.llm.collective_rpc("tinsmith_take_picture", args=(self._names, list(pixels.shape), pixels.tobytes()))
        asked = Request(prompt.tokens, prompt_logprobs=True)
        names = []
        for key in keys:
            draws = Draws(key=key, first=0, temperature=1.0, top_k=-1, top_p=1.0, topk=0)
            scores = Scores.of(asked, name="scores", seed=0) if scored and key == keys[0] else None
            params = SamplingParams(
                max_tokens=6, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY, extra_args=extra_args(draws, scores),
                skip_reading_prefix_cache=True if scored else None,
            )  # fmt: skip
            given: Any = tokens_input(tokens)
            if prompt.placed and self.processor is not None:
                given = picture_prompt(
                    tokens, prompt.placed, numbers, processor=self.processor, base_weights=0, cache_salt=None
                )
            self._names += 1
            lora = LoRARequest(f"adapter#{number}", number, "memory") if adapted else None
            names.append(engine.add_request(str(self._names), given, params, lora_request=lora))
        found: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step() if output.finished}
        for one in numbers:
            self.llm.collective_rpc("tinsmith_forget_picture", args=(one,))
        scorer = PromptScorer(asked, seed=0)
        if scored:
            scorer.restore(self.llm.collective_rpc("tinsmith_take_scores", args=("scores",))[0])
        outputs = sorted(found.values(), key=lambda one: int(one.request_id.split("-")[0]))
        return [Answer.of(output, scorer.logprobs[1:] if scored else None) for output in outputs]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    reused: int
    """Tokens of the prompt that the prefix cache had."""
    prompt: Any
    """Logprobs of the prompt's tokens but the first, if they were asked for."""

    @classmethod
    def of(cls, output: Any, prompt: Any) -> Answer:
        drawn = list(drawn_tokens(output.outputs[0], 0))
        return cls([one.token for one in drawn], [one.logprob for one in drawn], output.num_cached_tokens or 0, prompt)


def gap(base: BaseModel, prompt: Prompt, answer: Answer, *, adapted: bool) -> float:
    """Largest difference of a logprob from Tinsmith's own."""
    whole = np.concatenate([prompt.tokens, np.array(answer.tokens, np.int32)])
    wanted = reference._sample(base, whole, ADAPTER if adapted else None, prompt.placed).logprobs
    found, count = np.array(answer.logprobs), len(answer.tokens)
    if answer.prompt is not None:
        found, count = np.concatenate([answer.prompt, found]), len(wanted)
    return float(np.abs(wanted[-count:] - found).max())


def compared(folder: Path, pictures: Sequence[bytes]) -> dict[str, Any]:
    """The largest difference of a logprob for prompts and what was drawn after them, what of equal prompts the prefix
    cache had, the blocks of the cache, and the groups of layers that take no adapter."""
    config = SamplerConfig(
        base_model=str(folder), device="cpu", num_threads=1, max_kv_tokens=512, prefix_cache_bytes=2**21,
        prefill_tokens_per_step=24, max_running=4, max_lora_rank=8,
    )  # fmt: skip
    measured = reference._measure(config)
    assert not measured.why_no_pictures, measured.why_no_pictures
    base = BaseModel.load(config.base_model, device=torch.device("cpu"), dtype=torch.float32)
    assert base.tower is not None
    processor = base.tower.processor
    wide, high, other = (processor.picture(one, "png", expected_tokens=None, field="picture") for one in pictures)
    set_environment(config, device="cpu")
    from vllm.distributed import cleanup_dist_env_and_memory

    vllm = Vllm(config, base, measured)
    cache = vllm.llm.llm_engine.vllm_config.cache_config
    pages = measured.pages
    planned = [pages.block_tokens, cache.kv_cache_memory_bytes // pages.block_bytes]
    names = {target.peft_names[0]: target.group for target in measured.targets}
    (without,) = vllm.llm.collective_rpc("tinsmith_without_place", args=(list(names),))
    found: dict[str, Any] = {"without": sorted({names[name] for name in without})}
    found |= {"blocks": [cache.block_size, cache.num_gpu_blocks], "planned blocks": planned}
    for name, prompt in {"text": Prompt.of(40), "pictures": Prompt.of(9, wide, 4, high, 2)}.items():
        plain, adapted = (vllm.ask(prompt, adapted=adapted, keys=[1, 2], scored=True) for adapted in (False, True))
        found[name] = max(gap(base, prompt, one, adapted=False) for one in plain)
        found[f"{name}, adapter"] = max(gap(base, prompt, one, adapted=True) for one in adapted)
        found[f"{name}, by the adapter"] = float(np.abs(plain[0].prompt - adapted[0].prompt).max())
    alike = [Prompt.of(6, one, 60) for one in (wide, other)]
    asked = [(prompt, vllm.ask(prompt, adapted=True, keys=[5])[0]) for _ in range(2) for prompt in alike]
    found["cache"] = max(gap(base, prompt, answer, adapted=True) for prompt, answer in asked)
    found["reused"] = [answer.reused for _, answer in asked]
    found["tokens"] = [wide.num_tokens, high.num_tokens]
    del vllm
    cleanup_dist_env_and_memory()
    return found


def main(root: str) -> None:
    pictures = [path.read_bytes() for path in sorted(Path(root).glob("*.png"))]
    folders = sorted(path for path in Path(root).iterdir() if path.is_dir())
    print(json.dumps({folder.name: compared(folder, pictures) for folder in folders}), flush=True)


if __name__ == "__main__":
    # The engine ends with the process that has started its own.
    process = multiprocessing.get_context("spawn").Process(target=main, args=(sys.argv[1],))
    process.start()
    process.join()
    sys.exit(process.exitcode)
