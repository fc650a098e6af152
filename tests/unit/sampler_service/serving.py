"""A torch engine on a tiny model, and what the tests hold it against."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor
from transformers import AutoModelForCausalLM

from sampler_service.config import SamplerConfig
from sampler_service.core.request import Generation, Params, Request, Result, StopCondition
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.engine import TorchEngine
from tinsmith.modeling.adapter import Adapter, AdapterConfig, Target
from tinsmith.modeling.base_model import BaseModel
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2 as types

NO_STOP = StopCondition()


@dataclass
class _Loaded:
    key: Any
    base: BaseModel
    parameters: list[Tensor]
    """A copy, which tells whether a test has changed them."""
    lent: bool = True


class _Bases:
    """Lends `TorchEngine.load` the base model of an engine that has stopped, if it was loaded from the same files with
    the same settings: loading and checking a base model is half of the processor time of a short test."""

    MOST = 4

    def __init__(self) -> None:
        self._all: list[_Loaded] = []
        """The one that was given back last is the last."""

    def load(self, path: str, **settings: Any) -> BaseModel:
        files = sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in Path(path).iterdir())
        key = (path, files, settings)
        for one in self._all:
            if one.key == key and not one.lent:
                one.lent = True
                return one.base
        base = BaseModel.load(path, **settings)
        copies = [parameter.detach().clone() for parameter in base.parameters.values()]
        self._all.append(_Loaded(key, base, copies))
        return base

    def give_back(self, base: BaseModel) -> None:
        one = next(one for one in self._all if one.base is base)
        self._all.remove(one)
        if all(map(torch.equal, base.parameters.values(), one.parameters)):
            one.lent = False
            self._all.append(one)
        if len(self._all) > self.MOST:
            self._all.pop(0)


_bases = _Bases()


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[TorchEngine]:
    config = SamplerConfig(base_model=str(folder), num_threads=1, **{"device": "cpu", **settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sampler_service.torch_engine.engine.BaseModel", _bases)
        engine = await TorchEngine.load(config, SamplerMetrics(CollectorRegistry()))
    try:
        yield engine
    finally:
        await engine.stop()
        _bases.give_back(engine.base)


async def alone_and_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Result, Result]]:
    """Results of requests that are drawn alone, each with that of the same request beside the others. There, those
    without max_tokens outgrow their lanes, give their places back, and are computed anew."""

    async def run(engine: TorchEngine, n: int) -> Result:
        max_tokens = None if n % 2 else 5 + 3 * n
        tokens = prompt(6 + 9 * n, seed=n, vocab_size=256)
        return await generate(engine, tokens, max_tokens=max_tokens, seed=n, num_samples=2)

    async with serving(folder) as engine:
        alone = [await run(engine, n) for n in range(6)]
    monkeypatch.setattr("sampler_service.torch_engine.waiting.SHORT_TOKENS", 32)
    monkeypatch.setattr("sampler_service.core.sequence.HEADROOM", 8)
    async with serving(folder, max_kv_tokens=600, prefill_tokens_per_step=20) as engine:
        together = await asyncio.gather(*(run(engine, n) for n in range(6)))
        assert metric(engine, "preemptions_total") > 0
        assert len(engine.scheduler.kv.caches) > 1
    return list(zip(alone, together, strict=True))


def prompt(length: int, *, seed: int = 0, vocab_size: int = 512) -> Any:
    return np.random.default_rng(seed).integers(vocab_size, size=length).astype(np.int32)


def request(tokens: Any, **fields: Any) -> Request:
    """Parameters and other fields of a request, told apart by their names."""
    params = {name: fields.pop(name) for name in list(fields) if name in Params.__slots__}
    return Request(tokens, params=Params(**{"stop": NO_STOP, **params}), **fields)


async def generate(engine: TorchEngine, tokens: Any, **fields: Any) -> Result:
    generation = await engine.submit(request(tokens, **fields))
    return await generation.result()


async def leave(generation: Generation) -> None:
    """As a caller that hangs up: cancels the generation."""
    reading = asyncio.ensure_future(anext(generation.deltas()))
    await asyncio.sleep(0)  # the reader waits now
    reading.cancel()
    await asyncio.wait([reading])


def make_adapter(targets: Sequence[Target], *, seed: int, rank: int = 4, **groups: bool) -> Adapter:
    adapter = Adapter.create(AdapterConfig(rank, seed=seed, **groups), targets, torch.device("cpu"))
    adapter.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    return adapter


def plain_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Logits of stock transformers, [T, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0]


def slow_down(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a generation of 250 tokens goes on for seconds, however busy the machine is that tests what it meets."""
    forward = type(engine.base).hidden_states

    def slowly(*args: Any, **kwargs: Any) -> Tensor:
        time.sleep(0.05)
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(engine.base), "hidden_states", slowly)


def metric(engine: TorchEngine, name: str, **labels: str) -> float:
    for family in engine.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == f"sampler_{name}" and sample.labels == labels:
                return sample.value
    return 0.0


def sample(tokens: Any, *, stop: pb.StopCondition | None = None, **fields: Any) -> pb.SampleRequest:
    params = {name: fields.pop(name) for name in list(fields) if name in pb.SamplingParams.DESCRIPTOR.fields_by_name}
    return pb.SampleRequest(
        prompt=[types.Chunk(encoded_text=types.EncodedText(tokens=np.asarray(tokens, "<i4").tobytes()))],
        sampling_params=pb.SamplingParams(stop=pb.StopCondition() if stop is None else stop, **params),
        **{"num_samples": 1, **fields},
    )


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4")
