"""The training engine on CUDA: steps give the CPU's weights, and checkpoints move between both without loss.

python -m pytest -m gpu tests/gpu/test_training.py -rs
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tests.gpu.device import CPU, DEVICE, MARKS
from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE, make_model, make_sparse_model
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FULL
from tinsmith.v1 import types_pb2 as pb
from trainer_service.engine.batch import Batch, Output
from trainer_service.engine.engine import CapturedState, TrainingEngine
from trainer_service.engine.optimizers import AdamParams, DimuonParams, Params
from trainer_service.metrics import Metrics
from trainer_service.requests import batch_of
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.locations import Location

pytestmark = MARKS

LENGTHS = (9, 30, 30, 17)
STEPS = 3
ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1, grad_clip_norm=1.0)
"""eps is large, so that the rounding of a gradient near zero does not become a step of another sign."""
DIMUON = DimuonParams(learning_rate=1e-2, beta1=0.9, grad_clip_norm=0.0)
WEIGHTS = 1e-4
"""Largest ||ours - expected|| / ||expected|| of weights after the steps."""
CHANGES = 1e-2
"""Largest error of what the steps have changed, in relation to its norm."""

ADAPTERS = {"adam": (AdapterConfig(rank=8, seed=1), ADAM), "dimuon": (AdapterConfig(rank=3, seed=2), DIMUON)}


def lora_engine(folder: Path, device: torch.device, *, dtype: torch.dtype = torch.float32) -> TrainingEngine:
    """With a model for each optimizer, whose first steps are made from B = 0 as in any training run."""
    engine = TrainingEngine(BaseModel.load(folder, device=device, dtype=dtype), max_tokens_per_microbatch=64)
    for model_id, (config, params) in ADAPTERS.items():
        engine.create_model(model_id, config, params.kind)
    return engine


def full_engine(folder: Path, device: torch.device) -> TrainingEngine:
    base = BaseModel.load(folder, device=device, dtype=torch.float32, trainable=True)
    engine = TrainingEngine(base, max_tokens_per_microbatch=64)
    engine.create_model("full", FULL, "adamw")
    return engine


def batch(engine: TrainingEngine, model_id: str, *, seed: int) -> Batch:
    """Supervised examples, or for Dimuon those of a policy gradient. They take two micro-batches."""
    policy = model_id == "dimuon"
    data = [random_datum(n, seed + i, vocab_size=VOCAB_SIZE, policy=policy) for i, n in enumerate(LENGTHS)]
    return batch_of(request(data, "importance_sampling" if policy else "cross_entropy"), engine.limits)


def params_of(model_id: str) -> Params:
    return ADAPTERS[model_id][1] if model_id in ADAPTERS else ADAM


def train(engine: TrainingEngine, *, seed: int = 0) -> list[float]:
    """Makes some steps of all models together. Returns their losses."""
    losses = []
    for step in range(seed, seed + STEPS):
        outputs = engine.forward_backward([(one, batch(engine, one, seed=10 * step)) for one in engine.models])
        for output in outputs:
            assert isinstance(output, Output), output
            losses.append(output.metrics["loss:sum"])
        for model_id in engine.models:
            engine.optim_step(model_id, params_of(model_id))
    return losses


def flat(engine: TrainingEngine, model_id: str) -> Tensor:
    return engine.weights(model_id).flat.detach().to(CPU, copy=True)


def error(ours: Tensor, expected: Tensor) -> float:
    return ((ours - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("make", [lora_engine, full_engine])
def test_steps_give_the_cpus_weights(make: Callable[[Path, torch.device], TrainingEngine], folder: Path) -> None:
    engine, reference = make(folder, DEVICE), make(folder, CPU)
    first = {model_id: flat(reference, model_id) for model_id in reference.models}
    assert train(engine) == pytest.approx(train(reference), rel=1e-4, abs=1e-3)
    for model_id, before in first.items():
        ours, theirs = flat(engine, model_id), flat(reference, model_id)
        assert error(ours, theirs) <= WEIGHTS, model_id
        assert error(ours - before, theirs - before) <= CHANGES, model_id
        assert (theirs - before).norm() > 100 * WEIGHTS * theirs.norm()


def test_adapters_of_experts_are_trained(tmp_path: Path) -> None:
    folder = make_sparse_model(tmp_path)
    engine, reference = lora_engine(folder, DEVICE), lora_engine(folder, CPU)
    train(engine)
    train(reference)
    for model_id in ADAPTERS:
        assert error(flat(engine, model_id), flat(reference, model_id)) <= WEIGHTS


def info_of(location: Location, state: CapturedState) -> pb.CheckpointInfo:
    assert state.optimizer is not None
    return pb.CheckpointInfo(
        location=str(location),
        kind=pb.CHECKPOINT_KIND_TRAINING,
        model_id=location.run_id,
        lora_config=config_to_proto(state.config),
        step=state.step,
        has_optimizer=True,
        optimizer=pb.Optimizer.Value(f"OPTIMIZER_{state.optimizer.kind.upper()}"),
    )


def assert_equal(one: CapturedState, other: CapturedState) -> None:
    """Bit by bit."""
    assert (one.config, one.step) == (other.config, other.step)
    assert torch.equal(one.adapter.flat, other.adapter.flat)
    assert one.optimizer is not None
    assert other.optimizer is not None
    assert one.optimizer.kind == other.optimizer.kind
    assert one.optimizer.tensors.keys() == other.optimizer.tensors.keys()
    for name, tensor in one.optimizer.tensors.items():
        assert torch.equal(tensor, other.optimizer.tensors[name]), name


@pytest.mark.parametrize("make", [lora_engine, full_engine])
def test_a_checkpoint_moves_to_the_cpu_and_back_bit_for_bit(
    make: Callable[[Path, torch.device], TrainingEngine], folder: Path, tmp_path: Path
) -> None:
    """Through the files. Training goes on from it on both devices, to the same weights."""
    store = CheckpointStore(tmp_path / "checkpoints", Metrics(CollectorRegistry()))
    engine = make(folder, DEVICE)
    train(engine)
    saved = {model_id: engine.capture(model_id, with_optimizer=True) for model_id in engine.models}
    elsewhere = make(folder, CPU)
    for model_id, state in saved.items():
        assert state.optimizer is not None
        assert {tensor.device for tensor in (state.adapter.flat, *state.optimizer.tensors.values())} == {CPU}
        location = Location("s:train:0", "weights", model_id)
        store.save(info_of(location, state), state, overwrite=False)
        _, loaded = store.load(location, elsewhere.base, with_optimizer=True)
        assert_equal(loaded, state)
        elsewhere.restore(model_id, loaded, with_optimizer=True)
        assert_equal(elsewhere.capture(model_id, with_optimizer=True), state)
    train(engine, seed=STEPS)
    train(elsewhere, seed=STEPS)
    for model_id, state in saved.items():
        assert error(flat(engine, model_id), flat(elsewhere, model_id)) <= WEIGHTS
        there = elsewhere.capture(model_id, with_optimizer=True)
        engine.restore(model_id, there, with_optimizer=True)
        assert_equal(engine.capture(model_id, with_optimizer=True), there)
        assert there.step == state.step + STEPS
    store.close()


def test_models_that_wait_in_host_memory_come_back_bit_for_bit(folder: Path) -> None:
    engine = lora_engine(folder, DEVICE)
    train(engine)
    states = {model_id: engine.capture(model_id, with_optimizer=True) for model_id in engine.models}
    engine.memory.residency.offload_all_but([])
    assert sorted(engine.memory.residency.on_host) == (sorted(ADAPTERS) if DEVICE.type == "cuda" else [])
    engine.memory.residency.use(ADAPTERS, max_bytes=None)
    for model_id, state in states.items():
        assert engine.weights(model_id).flat.device.type == DEVICE.type
        assert_equal(engine.capture(model_id, with_optimizer=True), state)
    train(engine, seed=STEPS)


def test_training_in_bfloat16_lowers_the_loss(folder: Path) -> None:
    """With the kernels and grouped products that bfloat16 gets; adapters and optimizers are float32."""
    engine = lora_engine(folder, DEVICE, dtype=torch.bfloat16)
    one = batch(engine, "adam", seed=0)
    losses = []
    for _ in range(6):
        (output,) = engine.forward_backward([("adam", one)])
        assert isinstance(output, Output), output
        losses.append(output.metrics["loss:sum"])
        engine.optim_step("adam", ADAM)
    assert engine.weights("adam").flat.dtype == torch.float32
    assert losses == sorted(losses, reverse=True)
