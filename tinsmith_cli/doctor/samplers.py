"""Logprobs of each sampling engine, for the common tokens and for tokens that it draws itself.

Shapes: P prompt tokens, N drawn tokens.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from sampler_service.config import SamplerConfig
from sampler_service.core.engine import SamplingEngine
from sampler_service.core.request import Ints, Params, Request, Result, StopCondition
from sampler_service.metrics import SamplerMetrics
from tinsmith.errors import ServiceError
from tinsmith.modeling.adapter import GROUPS, Group
from tinsmith.modeling.self_check import random_adapter
from tinsmith_cli.doctor.subject import ALL, BASE, Example, Logprobs, Subject, Unloadable, failed, free

_BATCHES = (1, 8)
"""Numbers of sequences with which the speed is measured."""
_PROMPT = 16
"""Length of the prompt with which the speed is measured, in tokens."""


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine that may be installed. Its class has the coroutines `load(config, metrics)` and `stop()`."""

    name: str
    needs: str
    """Python package that the engine needs."""
    module: str
    class_name: str

    def missing(self) -> str:
        """The reason for which the engine cannot be used; empty if it can."""
        if importlib.util.find_spec(self.needs) is None:
            return f"not installed: there is no package {self.needs}"
        if importlib.util.find_spec(self.module) is None:
            return f"{self.needs} is installed, but this version of Tinsmith has no engine for it"
        return ""


KINDS = (
    Kind("torch", "torch", "sampler_service.torch_engine.engine", "TorchEngine"),
    Kind("vllm", "vllm", "sampler_service.vllm.engine", "VllmEngine"),
)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnSequence:
    """One sequence that an engine drew, with the engine's logprobs."""

    name: str
    """Name of the adapter."""
    temperature: float
    prompt_P: Ints
    tokens_N: Ints
    logprobs_N: np.ndarray


@dataclass(slots=True)
class SamplerFindings:
    """The results of one sampling engine."""

    engine: str
    failure: str = ""
    """The reason for which results are missing; empty if the engine was examined."""
    groups: Sequence[Group] = ()
    """Groups whose adapters the engine serves."""
    logprobs: dict[str, Logprobs] = field(default_factory=dict)
    """Logprobs of each prompt's tokens except its first, with the base model and with an adapter, by name."""
    drawn: list[DrawnSequence] = field(default_factory=list)
    tokens_per_s: Mapping[int, float] = field(default_factory=dict)
    """Drawn tokens per second, by the size of the batch."""
    max_length: int = 0
    """Largest length of prompt and output together, in tokens."""
    eos_token_ids: Sequence[int] = ()


def examine(kind: Kind, subject: Subject, sequences: Sequence[Example]) -> SamplerFindings:
    """Examines one engine. An error of the engine becomes the `failure` of the findings."""
    found = SamplerFindings(kind.name)
    try:
        asyncio.run(_examine(found, kind, subject, sequences))
    except Unloadable as error:
        found.failure = str(error)
    except ServiceError as error:
        found.failure = error.message
    finally:
        free(subject.device)
    return found


async def _examine(found: SamplerFindings, kind: Kind, subject: Subject, sequences: Sequence[Example]) -> None:
    config = SamplerConfig(
        base_model=subject.path,
        device="cuda" if subject.device.type == "cuda" else "cpu",
        dtype="float32" if subject.dtype == torch.float32 else "bfloat16",
        quantize=subject.quantize,
        num_threads=subject.num_threads,
        prefix_cache_bytes=0,  # so that every token is computed
    )
    load = getattr(importlib.import_module(kind.module), kind.class_name).load
    try:
        engine: Any = await load(config, SamplerMetrics(CollectorRegistry()))
    except Exception as error:
        raise failed(subject.path, error) from error
    try:
        await _ask(found, engine, subject, sequences)
    finally:
        await engine.stop()


async def _ask(found: SamplerFindings, engine: SamplingEngine, subject: Subject, sequences: Sequence[Example]) -> None:
    found.groups = [group for group in GROUPS if any(target.group == group for target in engine.targets)]
    found.max_length = engine.limits.max_length
    found.eos_token_ids = sorted(engine.eos_token_ids)
    versions = {BASE: ""}
    adapters = subject.adapters(found.groups)
    if adapters:
        name = ALL if ALL in adapters else next(iter(adapters))
        versions[name] = "doctor"
        await engine.install("doctor", random_adapter(adapters[name], engine.targets, torch.device("cpu")))
    length = 8 if subject.quick else 24
    work: list[tuple[str, float, Request]] = []
    for name, version in versions.items():
        for sequence in sequences:
            whole = np.append(sequence.tokens_N, sequence.targets_N[-1]).astype(np.int32)
            prompt_P = whole[: engine.limits.max_length - 1]
            work.append((name, -1.0, Request(prompt_P, version, params=Params(max_tokens=1), prompt_logprobs=True)))
        for temperature in (0.0, 1.0):
            for sequence in (sequences[0], sequences[-2]):
                longest = engine.limits.max_length - length
                prompt_P = sequence.tokens_N[: max(1, longest)].astype(np.int32)
                params = Params(
                    max_tokens=min(length, max(1, longest)), seed=1, temperature=temperature, stop=StopCondition()
                )
                work.append((name, temperature, Request(prompt_P, version, params=params)))
    # All requests are submitted at once, so that each runs beside requests of other lengths and versions.
    generations = [await engine.submit(request) for _, _, request in work]
    results: list[Result] = await asyncio.gather(*(generation.result() for generation in generations))
    for (name, temperature, request), result in zip(work, results, strict=True):
        if temperature < 0:
            assert result.prompt.logprobs is not None
            found.logprobs[name] = [*found.logprobs.get(name, []), result.prompt.logprobs[1:]]
        else:
            (sequence,) = result.sequences
            tokens_N, logprobs_N = np.array(sequence.tokens, np.int32), np.array(sequence.logprobs, np.float32)
            found.drawn.append(DrawnSequence(name, temperature, request.prompt, tokens_N, logprobs_N))
    version = list(versions.values())[-1]
    found.tokens_per_s = {size: await _speed(engine, size, version, quick=subject.quick) for size in _BATCHES}


async def _speed(engine: SamplingEngine, size: int, version: str, *, quick: bool) -> float:
    """Speed at which `size` sequences draw tokens together, in tokens per second, without the time for their prompt."""
    seconds, numbers = [], (2, 10 if quick else 34)
    for number in numbers:
        prompt = np.arange(_PROMPT, dtype=np.int32)
        params = Params(max_tokens=number, seed=0, stop=StopCondition())
        started = time.perf_counter()
        generation = await engine.submit(Request(prompt, version, num_samples=size, params=params))
        await generation.result()
        seconds.append(time.perf_counter() - started)
    return size * (numbers[1] - numbers[0]) / max(seconds[1] - seconds[0], 1e-9)
