"""The code for CUDA, from end to end on a device that computes nothing (tests/support/hollow_cuda.py): the trainer's
passes, optimizers and moves to the host, and the torch sampler's steps, in bfloat16 with float32 adapters and with the
kernels that an H100 gets.

Code that passes here has tensors of the right shape and type in the right place in every operation, forward and
backward, and makes the host wait where it says below and nowhere else. Only tests/gpu can tell whether numbers are
right, and whether the real kernels take what they are given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM, PreTrainedModel

from sampler_service.config import SamplerConfig
from sampler_service.core.request import Params, Request, RequestLimits, StopCondition
from sampler_service.core.sizing import Sizes
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine import runner
from sampler_service.torch_engine.engine import Add, TorchEngine
from sampler_service.torch_engine.graphs import Replay
from tests.support.hollow_cuda import DEVICE, HollowCuda, hollow_cuda
from tests.support.models import make_model, make_sparse_model
from tests.support.parameters import fast_ones
from tinsmith.cores import Cores
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.grouped_lora import torch_grouped_mm
from tinsmith.modeling.kernels import choice
from tinsmith.modeling.kernels.elementwise import EAGER
from tinsmith.modeling.kernels.varlen import TorchVarlen
from tinsmith.modeling.self_check import random_adapter
from trainer_service.engine.batch import Batch, Datum, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.optimizers import AdamParams, DimuonParams
from trainer_service.objectives.losses import LOSS_FNS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it reaches into libc10.so"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch knows CUDA; tests/gpu is for it"),
    pytest.mark.filterwarnings(
        "ignore:Accessing the data pointer of FakeTensor"
    ),  # to see whether it is aligned: it is
]

PASS = {
    "trainer_service/engine/passes.py: _compute",  # the logprobs
    "trainer_service/engine/passes.py: _gradients",  # the gradients of the losses
    "tinsmith/modeling/logprobs.py: backward",  # which of those are zero
    "trainer_service/engine/optimizers.py: magnitude",  # whether a model's gradient is finite
}
"""Where a forward_backward waits: the losses are computed on the host, and their gradients come back from there."""


@pytest.fixture(params=fast_ones(["dense", "experts"], ["dense"]))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    """Still on the host: transformers loads through the meta device, which the next fixture takes for its own."""
    folder = (
        make_sparse_model(tmp_path, num_hidden_layers=1)
        if request.param == "experts"
        else make_model(tmp_path, head_dim=64, num_hidden_layers=1)
    )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")


@pytest.fixture
def cuda(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[HollowCuda]:
    """An H100 without flash-attn and Liger."""
    for package in ("flash_attn", "flash_attn.flash_attn_interface", "liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]  # importing it raises
    monkeypatch.setattr(choice, "compiled", lambda device, dtype: EAGER)  # Triton compiles for what is there
    with hollow_cuda(monkeypatch) as mode:
        yield mode


@pytest.fixture
def base(model: PreTrainedModel, cuda: HollowCuda) -> BaseModel:
    base = BaseModel.of(model.to(DEVICE), path=model.name_or_path)  # type: ignore[arg-type]
    assert isinstance(base.kernels.attention, TorchVarlen)
    assert base.kernels.grouped_mm is torch_grouped_mm
    assert base.kernels.elementwise is EAGER
    assert base.groups == ["attn", "mlp", "unembed"]
    return base


def batch(*lengths: int, forward_only: bool = False) -> Batch:
    datums = [
        Datum(np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int64), {"weights": np.ones(n, np.float32)})
        for n in lengths
    ]
    loss = LOSS_FNS["cross_entropy"]
    return Batch(loss_fn="cross_entropy", loss=loss, loss_config={}, forward_only=forward_only, datums=datums)


ADAM = AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
DIMUON = DimuonParams(learning_rate=1e-3, beta1=0.9, grad_clip_norm=1.0)


@pytest.fixture
def engine(base: BaseModel, cuda: HollowCuda) -> TrainingEngine:
    """With a model for each optimizer, of a rank that kernels take as it is and of one that they do not."""
    engine = TrainingEngine(base, max_tokens_per_microbatch=256)
    engine.create_model("adam", AdapterConfig(rank=8, seed=1), "adamw")
    engine.create_model("dimuon", AdapterConfig(rank=3, seed=2), "dimuon")
    cuda.waits.clear()
    return engine


def test_training_waits_for_the_device_only_where_it_must(engine: TrainingEngine, cuda: HollowCuda) -> None:
    for names in (["adam"], ["adam", "dimuon"]):  # one tenant, and two in grouped products
        cuda.waits.clear()
        outputs = engine.forward_backward([(name, batch(5, 9, 9)) for name in names])
        assert all(isinstance(output, Output) for output in outputs), outputs
        assert set(cuda.waits) == PASS
        assert cuda.waits.total() == 3 + len(names)
    for name in ("adam", "dimuon"):
        gradient = engine.models[name].gradient
        assert gradient is not None
        assert (gradient.flat.device, gradient.flat.dtype) == (DEVICE, torch.float32)
    for _ in range(2):  # the first step asks once how large the numbers are, and the later ones go on from there
        cuda.waits.clear()
        engine.optim_step("adam", ADAM)
        engine.optim_step("dimuon", DIMUON)
    assert cuda.waits == {"trainer_service/engine/optimizers.py: clip_gradient": 2}

    engine.memory.residency.offload_all_but([])
    assert engine.memory.residency.on_host == ["adam", "dimuon"]
    assert {engine.weights(name).flat.device.type for name in ("adam", "dimuon")} == {"cpu"}
    cuda.waits.clear()
    outputs = engine.forward_backward([("adam", batch(5, 9, forward_only=True)), ("dimuon", batch(3))])
    assert all(isinstance(output, Output) for output in outputs), outputs
    assert engine.memory.residency.on_host == []
    assert set(cuda.waits) == PASS  # back from pinned memory, beside the computation
    for name, params in (("adam", ADAM), ("dimuon", DIMUON)):
        engine.optim_step(name, params)
        state = engine.capture(name, with_optimizer=True)
        assert state.optimizer is not None
        assert {tensor.device.type for tensor in [state.adapter.flat, *state.optimizer.tensors.values()]} == {"cpu"}
        engine.restore(name, state, with_optimizer=True)
        engine.optim_step(name, params)


async def test_sampling_waits_for_the_device_once_in_a_step_that_only_decodes(
    base: BaseModel, cuda: HollowCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Replay] = []

    def capture(compute: Callable[[], None]) -> Replay:
        before = cuda.waits.copy()
        compute()
        assert cuda.waits == before  # a graph cannot make the host wait
        captured.append(compute)
        return compute

    monkeypatch.setattr(runner, "CudaCapture", lambda device: capture)
    config = SamplerConfig(
        base_model=base.path, max_lora_rank=16, max_kv_tokens=2048, prefix_cache_bytes=1 << 20, max_running=8
    )
    sizes = Sizes.of(base, config)
    limits = RequestLimits(
        vocab_size=base.vocab_size, max_context_length=base.max_context_length, max_kv_tokens=sizes.max_kv_tokens,
        max_num_samples=8, max_topk_logprobs=8,
    )  # fmt: skip
    cores = Cores("", most=0, set_threads=lambda _: None)
    engine = TorchEngine(base, sizes, limits, config, SamplerMetrics(CollectorRegistry()), cores)
    engine.store.install("run/1", random_adapter(AdapterConfig(rank=4, seed=0), base.targets, base.device))
    length = 40
    prompt = np.arange(length, dtype=np.int32)
    stop = StopCondition()
    for request in (
        Request(prompt, "", num_samples=2, params=Params(max_tokens=6, top_p=0.9, stop=stop), prompt_logprobs=True),
        Request(prompt, "run/1", num_samples=4, params=Params(max_tokens=6, top_k=5, temperature=0.7, stop=stop)),
        Request(prompt, "run/1", params=Params(max_tokens=6, temperature=0.0, stop=stop), prompt_alt_tokens_k=2),
    ):
        await engine.submit(request)
    while not engine.commands.empty():
        command = engine.commands.get()
        assert isinstance(command, Add)
        engine.scheduler.add(command.jobs)
    draws, positions = "sampler_service/torch_engine/runner.py: draw", "tinsmith/modeling/kv_cache.py: __init__"
    waits = []
    for step in range(6):
        cuda.integer = length + step - 1  # the positions, which a step asks the device for
        cuda.waits.clear()
        engine._step()
        waits.append(set(cuda.waits))
    assert waits[2:] == [{draws, positions}, {draws}, {draws}, {draws}]  # the last three are captured
    assert len(captured) == 1
    assert engine.scheduler.idle
    ended = engine.scheduler.take_output().ended
    assert [type(outcome).__name__ for _, outcome in ended] == ["Result"] * 3


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with hollow_cuda(monkeypatch):
        yield


@pytest.mark.usefixtures("alone")
def test_the_hollow_device_refuses_what_a_real_one_would() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(torch.ones(3, device=DEVICE), torch.ones(3))
    with pytest.raises(RuntimeError, match="must be of one dtype"):
        torch.mm(torch.ones(3, 3, device=DEVICE), torch.ones(3, 3, device=DEVICE, dtype=torch.bfloat16))
    ends = torch.tensor([4, 8], dtype=torch.int32, device=DEVICE)
    left, right = (torch.ones(shape, device=DEVICE, dtype=torch.bfloat16) for shape in ((8, 12), (2, 12, 16)))
    with pytest.raises(RuntimeError, match="16 bytes"):
        torch_grouped_mm(left, right, ends)
