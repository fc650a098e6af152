"""Compares vLLM with our own model of the base model, before the sampler serves."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import torch

from sampler_service.core.engine import SamplingEngine
from sampler_service.core.request import Params, Request, StopCondition
from sampler_service.core.self_check import Comparison
from sampler_service.vllm.reference import Reference, Sample
from tinsmith.modeling.adapter import Group
from tinsmith.modeling.pretrained import UnsupportedModel
from tinsmith.modeling.self_check import TOLERANCE, random_adapter

logger = logging.getLogger(__name__)

_DRAWN = Params(max_tokens=4, top_p=0.9, stop=StopCondition())


class Checked(SamplingEngine, Protocol):
    async def without_place(self, peft_names: list[str]) -> Collection[str]: ...

    def refuse_group(self, group: Group, reason: str) -> None: ...

    def refuse_pictures(self, reason: str) -> None: ...


async def check_engine(engine: Checked, reference: Reference, *, max_waiting: int) -> None:
    """Refuses groups of layers for which vLLM takes no adapters, or whose adapters it computes differently. Raises
    UnsupportedModel when it computes the base model differently.

    `max_waiting`: requests that the engine takes at once.
    """
    await _choose_targets(engine)
    tolerance = TOLERANCE[getattr(torch, reference.dtype)]
    gap = await _gap(engine, reference, reference.base)
    if gap > tolerance:
        raise UnsupportedModel(f"{reference.architecture}: {_reason(gap, tolerance)}")
    for group, sample in reference.groups.items():
        if any(target.group == group for target in engine.targets):
            gap = await _gap(engine, reference, sample, group)
            if gap > tolerance:
                engine.refuse_group(group, _reason(gap, tolerance))
    await _check_decoding(engine, reference, max_waiting=max_waiting, tolerance=tolerance)
    if not engine.why_no_pictures:
        await _check_pictures(engine, reference, max_waiting=max_waiting, tolerance=tolerance)
    for one in engine.store.versions():
        engine.store.remove(one.version_id)


async def _choose_targets(engine: Checked) -> None:
    names = {target.peft_names[0]: target for target in engine.targets if target.num_experts is None}
    for target in engine.targets:
        if target.num_experts is not None:
            engine.refuse_group(target.group, f"{target.name} is a tensor of all experts")
    if names:
        for name in await engine.without_place(list(names)):
            engine.refuse_group(names[name].group, f"vLLM takes no adapter for {names[name].name}")


async def _gap(engine: Checked, reference: Reference, sample: Sample, group: Group | None = None) -> float:
    """Largest difference of a logprob of the sample. A group's random adapter stays installed."""
    version_id = ""
    if sample.config is not None:
        version_id = f"self-check-{group}"
        adapter = random_adapter(sample.config, reference.targets, torch.device("cpu"))
        await engine.install(version_id, adapter)
    request = Request(
        sample.prompt,
        version_id,
        params=Params(max_tokens=1, stop=StopCondition()),
        prompt_logprobs=True,
        pictures=sample.placed,
    )
    result = await (await engine.submit(request)).result()
    assert result.prompt.logprobs is not None
    gap = float(np.abs(result.prompt.logprobs[1:] - sample.logprobs).max())
    logger.info(
        "self-check of vLLM, %s: logprobs differ by %.2g at most",
        group or ("pictures" if sample.placed else "base"),
        gap,
    )
    return gap if np.isfinite(gap) else float("inf")


def _reason(gap: float, tolerance: float) -> str:
    return f"vLLM's logprobs differ by {gap:.3g} (limit {tolerance:g}) from those of the model that is trained"


async def _check_decoding(engine: Checked, reference: Reference, *, max_waiting: int, tolerance: float) -> None:
    """Tokens drawn one by one against the same tokens as a prompt, of all versions in one batch."""
    version_ids = ["", *(one.version_id for one in engine.store.versions())]
    requests = [Request(reference.base.prompt, one, num_samples=2, params=_DRAWN) for one in version_ids]
    await _compare(engine, requests, max_waiting=max_waiting, tolerance=tolerance)


async def _check_pictures(engine: Checked, reference: Reference, *, max_waiting: int, tolerance: float) -> None:
    """Refuses pictures if vLLM gives other logprobs for prompts with pictures, or for tokens drawn after them."""
    gap = max([await _gap(engine, reference, sample) for sample in reference.pictures], default=float("inf"))
    if gap > tolerance:
        engine.refuse_pictures(f"with pictures {_reason(gap, tolerance)}")
        return
    requests = [Request(one.prompt, num_samples=2, params=_DRAWN, pictures=one.placed) for one in reference.pictures]
    try:
        await _compare(engine, requests, max_waiting=max_waiting, tolerance=tolerance)
    except UnsupportedModel as error:
        engine.refuse_pictures(f"with pictures {error}")


async def _compare(engine: Checked, requests: Sequence[Request], *, max_waiting: int, tolerance: float) -> None:
    """Raises UnsupportedModel when tokens that the requests draw have other logprobs in a prompt."""
    generations = [await engine.submit(request) for request in requests[:max_waiting]]
    for request, generation in zip(requests, generations, strict=False):
        for one in Comparison.of(request, await generation.result()):
            one.check(await (await engine.submit(one.request)).result(), tolerance=tolerance)
