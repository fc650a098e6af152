"""Requests with every option, and versions of several ranks and groups: what each server is asked."""

from __future__ import annotations

import asyncio

import numpy as np

from sampler_service.torch_engine.engine import TorchEngine
from tests.unit.sampler_service.serving import make_adapter, sample
from tests.vllm.client import Service, assert_same, tokens_of, torch_sample
from tinsmith.modeling.adapter import Adapter
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import sampler_pb2 as pb

CHUNK = 64
"""Tokens of a step: longer prompts are computed in pieces."""
SLOTS = 2
"""Versions on the device at once."""
LORA_RANK = 12
"""Largest one: none of the ranks that vLLM knows."""
VERSIONS = ("all", "odd", "attn", "head")
FLAGS = {
    "max-lora-rank": LORA_RANK,
    "max-device-versions": SLOTS,
    "max-kv-tokens": 4096,
    "prefix-cache-bytes": 4 * 1024 * 1024,
    "prefill-tokens-per-step": CHUNK,
    "max-running": 12,
    "max-waiting": 64,
}
"""Settings of the servers that run every case."""


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "maxProperties": 1}'


def requests() -> dict[str, pb.SampleRequest]:
    """Every option, on the base model and on versions, short prompts and such as are computed in pieces."""
    short, long = tokens_of(20, 1), tokens_of(3 * CHUNK + 7, 2)
    targets = np.random.default_rng(3).integers(-1, 2000, size=(len(short) - 1, 3)).astype(np.int64)
    cut = {"temperature": 0.7, "top_k": 30, "top_p": 0.8}
    return {
        "greedy": sample(short, temperature=0.0, max_tokens=12),
        "plain": sample(short, seed=7, max_tokens=12, num_samples=3),
        "cut": sample(short, seed=8, max_tokens=12, num_samples=4, **cut),
        "penalized": sample(
            short, seed=14, max_tokens=24, num_samples=2, min_p=0.01, frequency_penalty=1.5, presence_penalty=0.5,
            repetition_penalty=1.2, logit_bias={5: 6.0, 7: -100.0},
        ),
        "in pieces, penalized": sample(long, seed=15, max_tokens=12, temperature=1.2, repetition_penalty=1.5),
        "json": sample(short, seed=16, max_tokens=40, num_samples=3, grammar=pb.Grammar(json_schema=SCHEMA)),
        "in pieces, json": sample(
            long, version_id="all", seed=17, max_tokens=30, top_p=0.9, topk_sample_logprobs=2,
            grammar=pb.Grammar(json_schema=SCHEMA),
        ),
        "negative seed": sample(short, seed=-5, max_tokens=6, temperature=1.3),
        "in pieces": sample(long, seed=9, max_tokens=6, num_samples=2, **cut),
        "long, scored": sample(
            long, version_id="all", seed=9, max_tokens=4, prompt_logprobs=True, topk_prompt_logprobs=4
        ),
        "last n": sample(
            long, version_id="head", seed=9, max_tokens=2, prompt_logprobs=True, prompt_logprobs_last_n=10,
            topk_prompt_logprobs=2,
        ),
        "tables": sample(short, version_id="odd", seed=10, max_tokens=8, topk_sample_logprobs=5, num_samples=2),
        "greedy table": sample(short, version_id="all", temperature=0.0, max_tokens=8, topk_sample_logprobs=3),
        "targets": sample(
            short, version_id="head", seed=11, max_tokens=3, target_prompt_logprobs=from_numpy(targets)
        ),
        "alternatives": sample(
            short, version_id="attn", seed=12, max_tokens=3, temperature=0.7, prompt_alt_tokens_k=3,
            prompt_logprobs=True,
        ),
        "all": sample(short, version_id="all", seed=13, max_tokens=12, num_samples=2, **cut),
        "odd": sample(short, version_id="odd", seed=13, max_tokens=12, num_samples=2, **cut),
        "attn": sample(short, version_id="attn", seed=13, max_tokens=12, num_samples=2, **cut),
        "head": sample(short, version_id="head", seed=13, max_tokens=12, num_samples=2, **cut),
    }  # fmt: skip


async def publish_adapters(service: Service, torch_engine: TorchEngine) -> dict[str, Adapter]:
    """Versions of several ranks and groups, on both engines; more than the device has slots for."""
    made = {
        "all": make_adapter(torch_engine.targets, seed=1, rank=8),
        "odd": make_adapter(torch_engine.targets, seed=2, rank=3),
        "attn": make_adapter(torch_engine.targets, seed=3, rank=LORA_RANK, train_mlp=False, train_unembed=False),
        "head": make_adapter(torch_engine.targets, seed=4, rank=1, train_mlp=False, train_attn=False),
    }
    assert tuple(made) == VERSIONS
    for name, adapter in made.items():
        await service.publish(name, adapter)
        await torch_engine.install(name, adapter)
    return made


async def assert_each_alone_and_together(service: Service, torch_engine: TorchEngine) -> None:
    """Once the adapters are published: all requests in one batch, and then each by itself."""
    asked = requests()
    wanted = {name: await torch_sample(torch_engine, request) for name, request in asked.items()}
    together = await asyncio.gather(*(service.call("Sample", request) for request in asked.values()))
    for name, found in zip(asked, together, strict=True):
        try:
            assert_same(found, wanted[name])
        except AssertionError as error:
            raise AssertionError(f"in a batch, {name!r}: {error}") from None
    for name, request in asked.items():
        try:
            assert_same(await service.call("Sample", request), wanted[name])
        except AssertionError as error:
            raise AssertionError(f"alone, {name!r}: {error}") from None
    drawn = {name: wanted[name].sequences[0].logprobs for name in ("cut", *VERSIONS)}
    assert len(set(drawn.values())) == len(drawn)  # the versions differ
