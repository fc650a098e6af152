"""Pictures on CUDA: training passes give the CPU's logprobs and gradients, and the sampler gives transformers'.

python -m pytest -m gpu tests/gpu/test_pictures.py -rs
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.device import CPU, DEVICE, MARKS
from tests.gpu.test_families import GRADIENT, LOGPROB, cosine, error, load, moved
from tests.support.adapters import random_adapter
from tests.support.models import VISION, make_vision_model
from tests.unit.modeling.test_pictures import HIGH, WIDE, Sequence, packed
from tests.unit.sampler_service.serving import serving
from tests.unit.sampler_service.test_pictures import Oracle, answer, asked, chunk, text
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.base_model import BaseModel

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")]

PIECES = ([3, WIDE, 4, HIGH, 2], [7], [WIDE, 1], [2, HIGH, 6])
ADAPTED_TOWERS = ("Qwen3VL", "Qwen3_5", "Gemma3", "Gemma4")


def logprobs_and_gradients(base: BaseModel, *, train_vision: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprob [T] of each token as the successor of itself in a packed batch of pictures and text, and the gradients of
    an adapter by name, in host memory."""
    assert base.tower is not None, base.why_no_pictures
    adapter = moved(random_adapter(base.targets, seed=1, rank=3, train_vision=train_vision), base)
    sequences = [Sequence(base, list(pieces), seed) for seed, pieces in enumerate(PIECES)]
    factors = torch.cat([one.factors for one in sequences])
    logprobs = packed(base, sequences, [Run(adapter, slice(0, len(factors)))])
    grads = torch.autograd.grad((logprobs * factors.to(logprobs)).sum(), adapter.tensors())
    named = zip(adapter.specs(), grads, strict=True)
    return logprobs.detach().cpu(), {name: grad.cpu() for (name, _), grad in named}


@pytest.mark.parametrize(
    ("family", "train_vision"), [*((one, False) for one in VISION), *((one, True) for one in ADAPTED_TOWERS)]
)
def test_pictures_in_float32(family: str, train_vision: bool, tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path, family)
    ours, grads = logprobs_and_gradients(load(folder, DEVICE), train_vision=train_vision)
    theirs, expected = logprobs_and_gradients(load(folder, CPU), train_vision=train_vision)
    assert (ours - theirs).abs().max() <= LOGPROB
    off = {name: error(grad, expected[name]) for name, grad in grads.items()}
    assert max(off.values()) <= GRADIENT, off


@pytest.mark.parametrize("family", ["Qwen3VL", "Gemma3"])
def test_pictures_in_bfloat16(family: str, tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path, family)
    ours, grads = logprobs_and_gradients(load(folder, DEVICE, torch.bfloat16), train_vision=True)
    theirs, expected = logprobs_and_gradients(load(folder, CPU), train_vision=True)
    gaps = (ours - theirs).abs()
    assert gaps.median() < 0.03
    assert gaps.quantile(0.9) < 0.1
    cosines = {name: cosine(grad, expected[name]) for name, grad in grads.items()}
    assert torch.tensor(list(cosines.values())).median() > 0.98, cosines


@pytest.mark.parametrize("family", VISION)
async def test_the_sampler_is_transformers(family: str, tmp_path: Path) -> None:
    """Prompts of pictures and of text alone, computed in pieces of 8 tokens; their samples go on from one prompt."""
    oracle = Oracle(make_vision_model(tmp_path, family))
    prompts = [
        ([text(3), chunk(WIDE), text(4, seed=1), chunk(HIGH), text(2)], [WIDE, HIGH]),
        ([text(9)], []),
        ([text(20, seed=3), chunk(WIDE)], [WIDE]),
    ]
    async with serving(tmp_path, device=DEVICE.type, dtype="float32", prefill_tokens_per_step=8) as engine:
        requests = [asked(engine, *chunks, num_samples=3, prompt_logprobs=True) for chunks, _ in prompts]
        results = await asyncio.gather(*(answer(engine, one) for one in requests))
        for result, request, (_, images) in zip(results, requests, prompts, strict=True):
            oracle.check(result, request, images)
