"""Each CUDA kernel in bfloat16 against plain torch in float32 on the CPU, gradients included.

python -m pytest -m gpu tests/gpu -rs
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.device import CPU, DEVICE, MARKS, ONLY_CUDA
from tests.support.models import VOCAB_SIZE, make_model
from tinsmith.modeling import logprobs
from tinsmith.modeling.adapter import Adapter, AdapterConfig, Target
from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.grouped_lora import Groups, torch_grouped_mm
from tinsmith.modeling.heads import Heads
from tinsmith.modeling.kernels import elementwise
from tinsmith.modeling.kernels.choice import Kernels
from tinsmith.modeling.kernels.compiled import compiled
from tinsmith.modeling.kernels.elementwise import Elementwise
from tinsmith.modeling.kernels.flash_attn import FlashAttn
from tinsmith.modeling.kernels.liger import liger
from tinsmith.modeling.kernels.varlen import Kernel, TorchVarlen
from tinsmith.modeling.logprobs import Head, target_logprobs
from tinsmith.modeling.lora import LoraLinear

pytestmark = [*MARKS, ONLY_CUDA]

DTYPE = torch.bfloat16
TOLERANCE = 0.01
"""Largest ||ours - expected|| / ||expected||. bfloat16 rounds by 0.004 at most, and in the norm of many by 0.002."""


def assert_near(ours: Tensor, expected: Tensor, what: str = "") -> None:
    ours, expected = ours.detach().float().cpu(), expected.detach().float()
    error = (ours - expected).norm() / expected.norm().clamp_min(1e-6)
    assert error <= TOLERANCE, f"{what} is off by {error:.4f} of its norm"


def rounded(*shape: int, seed: int = 0) -> Tensor:
    """Random float32 values that bfloat16 has."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE).float()


def with_gradients(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of a weighted sum of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    weights = [rounded(*output.shape, seed=9).to(output) for output in outputs]
    total = torch.stack([(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]).sum()
    return [*outputs, *torch.autograd.grad(total, leaves)]


def assert_same_on_device(
    ours: Callable[..., Sequence[Tensor]], plain: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> None:
    expected = with_gradients(plain, inputs)
    actual = with_gradients(ours, [x.to(DEVICE, DTYPE) for x in inputs])
    for n, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert_near(mine, theirs, f"tensor {n}")


def flash_attn() -> Kernel:
    return FlashAttn(pytest.importorskip("flash_attn.flash_attn_interface", reason="flash-attn is not installed"))


@pytest.mark.parametrize("make", [TorchVarlen, flash_attn], ids=["torch", "flash-attn"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 2, 16, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128)])
def test_varlen_attention(
    make: Callable[[], Kernel], num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, sinks: bool
) -> None:
    check_attention(make(), num_heads, num_kv_heads, head_dim, window=window, sinks=sinks)


@pytest.mark.parametrize("sinks", [False, True])
def test_varlen_attention_with_a_softcap(sinks: bool) -> None:
    check_attention(flash_attn(), 4, 2, 64, window=None, sinks=sinks, softcap=5.0)


def check_attention(
    kernel: Kernel,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    window: int | None,
    sinks: bool,
    softcap: float | None = None,
) -> None:
    lengths = [200, 1, 64, 64, 37]
    shapes = [(sum(lengths), n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads)]
    inputs = [rounded(*shape, seed=n) for n, shape in enumerate(shapes)]
    if sinks:
        inputs.append(rounded(num_heads, seed=3))

    def attend(layout: Packed) -> Callable[..., Sequence[Tensor]]:
        def run(q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor | None = None) -> Sequence[Tensor]:
            heads = Heads(scale=head_dim**-0.5, window=window, softcap=softcap, sinks_N=sinks_N)
            if layout.flash is not None:
                assert layout.flash.kernel.takes(q, k, v, heads)
            return [layout.attend(0, q, k, v, heads)]

        return run

    assert_same_on_device(attend(Packed(lengths).with_kernel(kernel, DEVICE)), attend(Packed(lengths)), inputs)


@pytest.mark.parametrize("ranks", [(16, 16, 16), (32, 8, 3), (64,) + 15 * (4,)])
@pytest.mark.parametrize("gap", [0, 5])
def test_grouped_lora(ranks: tuple[int, ...], gap: int) -> None:
    """Against one tenant after the other, in float32 on the CPU; `gap` rows between tenants belong to none."""
    targets = [Target("layer", "attn", 256, 384)]
    lengths = [1 + 17 * n for n in range(len(ranks))]
    starts = [sum(lengths[:n]) + gap * n for n in range(len(ranks))]
    num_rows = starts[-1] + lengths[-1] + gap
    weight = rounded(384, 256, seed=1) / 16

    def layer(device: torch.device, dtype: torch.dtype, *, grouped: bool) -> tuple[LoraLinear, list[Tensor]]:
        runs = []
        for n, rank in enumerate(ranks):
            config = AdapterConfig(rank=rank, seed=n, train_mlp=False, train_unembed=False)
            adapter = Adapter.create(config, targets, CPU)
            adapter.flat.copy_(rounded(*adapter.flat.shape, seed=n) / 16)
            adapter = adapter.like(adapter.flat.to(device))
            for tensor in adapter.tensors():
                tensor.requires_grad_(True)
            runs.append(Run(adapter, slice(starts[n], starts[n] + lengths[n])))
        groups = Groups.of(runs, num_rows, device, torch_grouped_mm) if grouped else None
        base = torch.nn.Linear(256, 384, bias=False).requires_grad_(False).to(device, dtype)
        base.weight.copy_(weight)
        return LoraLinear(base, "layer", ActiveRuns(runs, groups)), [t for run in runs for t in run.adapter.tensors()]

    def outputs(device: torch.device, dtype: torch.dtype, *, grouped: bool) -> list[Tensor]:
        module, parameters = layer(device, dtype, grouped=grouped)
        x = rounded(1, num_rows, 256, seed=5).to(device, dtype).requires_grad_()
        y = module(x)
        grads = torch.autograd.grad((y * rounded(*y.shape, seed=6).to(y)).sum(), [x, *parameters])
        assert {grad.dtype for grad in grads[1:]} == {torch.float32}
        return [y, *grads]

    expected = outputs(CPU, torch.float32, grouped=False)
    for grouped in (True, False):
        for n, (ours, theirs) in enumerate(zip(outputs(DEVICE, DTYPE, grouped=grouped), expected, strict=True)):
            assert_near(ours, theirs, f"grouped {grouped}, tensor {n}")


def liger_kernels() -> Elementwise:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    return liger(importlib.import_module("liger_kernel.ops"))


@pytest.mark.parametrize("make", [lambda: compiled(DEVICE, DTYPE), liger_kernels], ids=["compiled", "liger"])
@pytest.mark.parametrize("num_tokens", [1, 37, 300])
def test_elementwise(make: Callable[[], Elementwise], num_tokens: int) -> None:
    backend = make()
    for gemma in (False, True):
        weight = rounded(256, seed=2)
        for shape in ((1, num_tokens, 256), (1, num_tokens, 4, 256)):
            assert_same_on_device(
                lambda x, w=weight, g=gemma: [backend.rms_norm(x, w.to(DEVICE, DTYPE), 1e-6, gemma=g)],
                lambda x, w=weight, g=gemma: [elementwise.rms_norm(x, w, 1e-6, gemma=g)],
                [rounded(*shape)],
            )
    gate_up = [rounded(1, num_tokens, 512, seed=n) for n in range(2)]
    assert_same_on_device(
        lambda gate, up: [backend.swiglu(1 * gate, 1 * up)], lambda gate, up: [elementwise.swiglu(gate, up)], gate_up
    )
    angles = torch.randn(1, num_tokens, 32).repeat(1, 1, 2)
    cos, sin = angles.cos().to(DTYPE).float(), angles.sin().to(DTYPE).float()
    heads = [rounded(1, num_tokens, n, 64, seed=n) for n in (4, 2)]
    assert_same_on_device(
        # 1 * x: the kernels may write where their inputs are
        lambda q, k: backend.rotary(
            (1 * q).transpose(1, 2), (1 * k).transpose(1, 2), cos.to(DEVICE, DTYPE), sin.to(DEVICE, DTYPE)
        ),
        lambda q, k: elementwise.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
        heads,
    )


def test_logprobs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Head, "max_rows", 64)
    hidden, weight = rounded(200, 128), rounded(5000, 128, seed=1) / 8
    tokens = torch.randint(5000, (200,), generator=torch.Generator().manual_seed(2))

    def run(x: Tensor) -> Sequence[Tensor]:
        return [target_logprobs(Head("head", weight.to(x)), x, torch.arange(200), tokens, [])]

    assert_same_on_device(run, run, [hidden])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, with features that every kernel takes."""
    return make_model(tmp_path_factory.mktemp("model"), head_dim=64)


LENGTHS = [9, 30, 30, 41]


def tenants(base: BaseModel) -> list[Run]:
    adapters = [Adapter.create(AdapterConfig(rank=rank, seed=rank), base.targets, CPU) for rank in (8, 3)]
    for adapter in adapters:
        generator = torch.Generator().manual_seed(adapter.config.rank)
        for weights in adapter.weights.values():
            weights.b_O_R.normal_(0, 0.02, generator=generator)
    adapters = [adapter.like(adapter.flat.to(base.device)) for adapter in adapters]
    for tensor in (tensor for adapter in adapters for tensor in adapter.tensors()):
        tensor.requires_grad_(True)
    return [Run(adapters[0], slice(0, 39)), Run(adapters[1], slice(39, 110))]


def logprobs_and_gradients(base: BaseModel) -> tuple[Tensor, list[Tensor]]:
    runs = tenants(base)
    tokens, targets = (torch.randint(VOCAB_SIZE, (110,), generator=torch.Generator().manual_seed(n)) for n in range(2))
    hidden = base.hidden_states(tokens.to(base.device), positions_of(LENGTHS, base.device), Packed(LENGTHS), runs)
    named = target_logprobs(base.head, hidden, torch.arange(110), targets, runs)
    parameters = [tensor for run in runs for tensor in run.adapter.tensors()]
    grads = torch.autograd.grad((named * rounded(110, seed=4).to(named)).sum(), parameters)
    return named.detach().cpu(), [grad.cpu() for grad in grads]


@pytest.mark.parametrize("setting", ["auto", "compiled", "plain"])
def test_two_tenants_through_a_whole_model(folder: Path, setting: str) -> None:
    plain = BaseModel.load(folder, device=CPU, dtype=torch.float32, kernels="plain")
    base = BaseModel.load(folder, device=DEVICE, dtype=DTYPE, kernels=setting)  # type: ignore[arg-type]
    assert (base.kernels == Kernels()) == (setting == "plain")
    ours, grads = logprobs_and_gradients(base)
    theirs, expected = logprobs_and_gradients(plain)
    assert (ours - theirs).abs().mean() < 0.02
    assert (ours - theirs).abs().max() < 0.1
    for grad, reference in zip(grads, expected, strict=True):
        assert grad.dtype == torch.float32
        assert torch.cosine_similarity(grad.ravel(), reference.ravel(), dim=0) > 0.99


def test_waits_for_the_device_do_not_grow_with_the_number_of_chunks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseModel.load(folder, device=DEVICE, dtype=DTYPE)
    logprobs_and_gradients(base)  # kernels are loaded, or compiled, at their first use

    def num_waits(rows_in_a_chunk: int) -> int:
        monkeypatch.setattr(logprobs.Head, "max_rows", rows_in_a_chunk)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                logprobs_and_gradients(base)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)

    assert num_waits(8) == num_waits(1000)
