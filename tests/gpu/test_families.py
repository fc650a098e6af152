"""Tiny models of several families on CUDA against plain float32 on the CPU: logprobs and gradients of two tenants.

python -m pytest -m gpu tests/gpu/test_families.py -rs
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.device import CPU, DEVICE, MARKS
from tests.support.adapters import random_adapter
from tests.support.models import make_model, make_sparse_model
from tests.unit.modeling.test_families import FAMILIES as SETTINGS
from tests.unit.modeling.test_families import make
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.quantization import QUANTIZATIONS, Quantization

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")]

FAMILIES = ("Qwen3_5Text", "NemotronH", "Qwen3", "Qwen3Moe", "GptOss", "Gemma3Text", "DeepseekV3")
"""Gated DeltaNet and Mamba2 first: the kernels of these layers take longest to compile."""
SMOOTH = ("Qwen3", "Gemma3Text")
"""In the other families, bfloat16 can change a few logprobs and gradients a lot: rounding sends tokens to other
experts, and it adds up in a state. There, the CPU's own bfloat16 gives single gradients with a cosine of 0.82."""
LENGTHS = [9, 30, 30, 71]
"""More than a chunk of a recurrent layer, more than a window of attention, and two that form one batch."""
LOGPROB = 1e-4
"""Largest difference of a logprob in float32."""
GRADIENT = 1e-3
"""Largest ||ours - expected|| / ||expected|| of a gradient in float32."""


def logprobs_and_gradients(base: BaseModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs [2, T] of random targets in a packed batch, from a pass with gradients and one without, and the
    gradients of both tenants' adapters by name, in host memory. The first tenant has the first two sequences."""
    adapters = [
        moved(random_adapter(base.targets, seed=seed, rank=rank), base)
        for seed, rank in zip((1, 2), (8, 3), strict=True)
    ]
    border, total = sum(LENGTHS[:2]), sum(LENGTHS)
    runs = [Run(adapters[0], slice(0, border)), Run(adapters[1], slice(border, total))]
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(base.vocab_size, (total,), generator=generator) for _ in range(2))
    factors = torch.randn(total, generator=generator)

    def named() -> Tensor:
        hidden = base.hidden_states(tokens.to(base.device), positions_of(LENGTHS, base.device), Packed(LENGTHS), runs)
        return target_logprobs(base.head, hidden, torch.arange(total), targets, runs)

    with torch.no_grad():  # which may take other kernels
        scored = named()
    logprobs = named()
    names = [f"{n} {name}" for n, adapter in enumerate(adapters) for name, _ in adapter.specs()]
    tensors = [tensor for adapter in adapters for tensor in adapter.tensors()]
    grads = torch.autograd.grad((logprobs * factors.to(logprobs)).sum(), tensors)
    assert {grad.dtype for grad in grads} == {torch.float32}
    both = torch.stack([logprobs.detach(), scored]).cpu()
    return both, {name: grad.cpu() for name, grad in zip(names, grads, strict=True)}


def moved(adapter: Adapter, base: BaseModel) -> Adapter:
    """The adapter on the model's device, where its tensors require gradients."""
    adapter = adapter.like(adapter.flat.detach().to(base.device, copy=True))
    for tensor in adapter.tensors():
        tensor.requires_grad_()
    return adapter


def error(ours: Tensor, expected: Tensor) -> float:
    return ((ours - expected).norm() / expected.norm()).item()


def cosine(ours: Tensor, expected: Tensor) -> float:
    return torch.cosine_similarity(ours.ravel(), expected.ravel(), dim=0).item()


def assert_same(base: BaseModel, reference: BaseModel) -> None:
    """Both models are float32."""
    assert base.targets == reference.targets
    assert (base.one_by_one, base.refused_groups) == ("", {})
    ours, grads = logprobs_and_gradients(base)
    theirs, expected = logprobs_and_gradients(reference)
    assert (ours - theirs).abs().max() <= LOGPROB
    off = {name: error(grad, expected[name]) for name, grad in grads.items()}
    assert max(off.values()) <= GRADIENT, off


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make(tmp_path_factory.mktemp(family), family, SETTINGS[family]) for family in FAMILIES}


def load(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> BaseModel:
    return BaseModel.load(folder, device=device, dtype=dtype, kernels="plain" if device is CPU else "auto")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_bfloat16(family: str, folders: dict[str, Path]) -> None:
    base = load(folders[family], DEVICE, torch.bfloat16)
    assert (base.one_by_one, base.refused_groups) == ("", {})
    ours, grads = logprobs_and_gradients(base)
    theirs, expected = logprobs_and_gradients(load(folders[family], CPU))
    gaps = (ours - theirs).abs()
    assert gaps.median(1).values.max() < 0.03
    assert gaps.quantile(0.9, dim=1).max() < 0.1
    cosines = {name: cosine(grad, expected[name]) for name, grad in grads.items()}
    assert torch.tensor(list(cosines.values())).median() > 0.98, cosines
    assert min(cosines.values()) > (0.99 if family in SMOOTH else 0.7), cosines


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_float32(family: str, folders: dict[str, Path]) -> None:
    assert_same(load(folders[family], DEVICE), load(folders[family], CPU))


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
@pytest.mark.parametrize("make_base", [make_model, make_sparse_model])
def test_a_quantised_base(make_base: Callable[[Path], Path], quantize: Quantization, tmp_path: Path) -> None:
    folder = make_base(tmp_path)
    base, reference = (
        BaseModel.load(folder, device=device, dtype=torch.float32, quantize=quantize, kernels=kernels)
        for device, kernels in ((DEVICE, "auto"), (CPU, "plain"))
    )
    assert base.weights_sum == reference.weights_sum
    assert_same(base, reference)
