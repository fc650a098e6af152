"""Models that wait lie in host memory: which ones, and that nobody sees it in the numbers."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.unit.trainer_service.engines import ADAM, batch, create, run
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.optimizers import DimuonParams
from trainer_service.engine.residency import Residency

HOST, DEVICE = "host", "device"


@dataclass
class Model:
    num_bytes: int
    where: str = DEVICE
    moves: list[str] = field(default_factory=list)

    def move(self, move: object) -> None:
        self.where = move(torch.empty(0))  # type: ignore[operator]
        self.moves.append(self.where)


def residency_of(**num_bytes: int) -> tuple[Residency, dict[str, Model]]:
    residency = Residency(to_device=lambda _: DEVICE, to_host=lambda _: HOST)  # type: ignore[arg-type, return-value]
    models = {model_id: Model(size) for model_id, size in num_bytes.items()}
    for model_id, model in models.items():
        residency.add(model_id, model)
    return residency, models


def test_the_ones_used_longest_ago_make_room_and_no_more_of_them_than_needed() -> None:
    residency, models = residency_of(a=10, b=10, c=10)
    residency.use(["a"], max_bytes=30)
    assert residency.on_host == []
    residency.use(["c"], max_bytes=25)
    assert residency.on_host == ["b"]
    residency.use(["b"], max_bytes=20)  # of a and c, a was used longer ago
    assert residency.on_host == ["a"]
    assert {model_id: model.where for model_id, model in models.items()} == {"a": HOST, "b": DEVICE, "c": DEVICE}
    assert residency.device_bytes == 20


def test_a_model_in_use_is_never_moved_away_whatever_it_takes() -> None:
    residency, models = residency_of(a=10, b=10, c=10)
    residency.use(["a", "b"], max_bytes=5)
    assert residency.on_host == ["c"]
    assert models["a"].moves == models["b"].moves == []


def test_without_a_limit_models_come_back_and_nobody_leaves() -> None:
    residency, _ = residency_of(a=10, b=10)
    residency.offload_all_but(["b"])
    assert residency.on_host == ["a"]
    residency.use(["a"], max_bytes=None)
    assert residency.on_host == []


def test_a_model_that_is_removed_is_forgotten_wherever_it_was() -> None:
    residency, _ = residency_of(a=10, b=10)
    residency.offload_all_but(["b"])
    for model_id in ("a", "b", "unknown"):
        residency.remove(model_id)
    assert (residency.on_host, residency.device_bytes) == ([], 0)


def test_on_the_cpu_nothing_moves() -> None:
    residency = Residency.on(torch.device("cpu"))
    model = Model(10)
    residency.add("a", model)
    residency.add("b", Model(10))
    residency.use(["b"], max_bytes=0)
    residency.offload_all_but([])
    assert model.moves == []


class FakeDevice:
    """Copies to and fro, and spoils what it has moved away from: a tensor that was kept by mistake would show."""

    def __init__(self) -> None:
        self.num_moves = 0

    def move(self, tensor: Tensor) -> Tensor:
        self.num_moves += 1
        copy = tensor.clone()
        with torch.no_grad():
            tensor.fill_(float("nan"))
        return copy


def trained(base: BaseModel, residency: Residency, plan: Plan) -> list[Tensor]:
    """Three models, of both optimizers, in turns and together, with captures in between."""
    engine = TrainingEngine(base, max_tokens_per_microbatch=100, residency=residency)
    engine.follow(plan)
    steps = {"a": ADAM, "b": ADAM, "c": DimuonParams(learning_rate=1e-2, beta1=0.9, grad_clip_norm=0.0)}
    results: list[Tensor] = []
    for model_id, params in steps.items():
        engine.create_model(model_id, AdapterConfig(rank=4, seed=3), params.kind)
    one = batch(engine, [9, 20])
    for _ in range(2):
        for model_id in steps:
            run(engine, model_id, one)
        engine.forward_backward([(model_id, one) for model_id in steps])
        for model_id, params in steps.items():
            engine.optim_step(model_id, params)
    run(engine, "a", one)  # gradients that are waiting move, too
    run(engine, "b", one)
    states = {model_id: engine.capture(model_id, with_optimizer=True) for model_id in steps}
    for state in states.values():
        assert state.optimizer is not None
        results += [state.adapter.flat, *state.optimizer.tensors.values()]
    engine.restore("c", states["c"], with_optimizer=True)
    for model_id, params in steps.items():
        engine.optim_step(model_id, params)
        results.append(engine.capture(model_id, with_optimizer=False).adapter.flat)
    return results


def test_models_that_come_and_go_train_alike(base: BaseModel) -> None:
    device = FakeDevice()
    moving = Residency(to_device=device.move, to_host=device.move)
    adapter_bytes = 4 * 4 * sum(target.in_features + target.out_features for target in base.targets)
    # Room for one model in training, with its gradient on the way, and never for two.
    plan = Plan(100, adapter_device_bytes=6 * adapter_bytes)
    expected = trained(base, Residency.on(base.device), Plan(100))
    # The three together are one micro-batch where nothing moves, and three where they do not go together.
    for ours, theirs in zip(trained(base, moving, plan), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)
    assert device.num_moves > 20


def test_a_micro_batch_has_few_models_that_wait_on_the_host(base: BaseModel) -> None:
    device = FakeDevice()
    residency = Residency(to_device=device.move, to_host=device.move)
    engine = TrainingEngine(base, max_tokens_per_microbatch=100, residency=residency)
    ids = [str(n) for n in range(8)]
    for model_id in ids:
        engine.create_model(model_id, AdapterConfig(rank=4, seed=3), "adamw")
    assert engine.passes.go_together(ids)
    residency.offload_all_but(ids[:3])
    assert engine.passes.go_together(ids[:6]), "three are on the device and three come"
    assert not engine.passes.go_together(ids)
    engine.forward_backward([(model_id, batch(engine, [5])) for model_id in ids])


def test_a_move_to_and_fro_changes_no_bit_and_leaves_the_parameters_trainable(base: BaseModel) -> None:
    device = FakeDevice()
    engine = TrainingEngine(
        base, max_tokens_per_microbatch=100, residency=Residency(to_device=device.move, to_host=device.move)
    )
    create(engine, "m")
    one = batch(engine, [9, 20])
    run(engine, "m", one)
    engine.optim_step("m", ADAM)
    run(engine, "m", one)
    model = engine.models["m"]
    assert model.gradient is not None
    gradient, state = model.gradient.flat.clone(), engine.capture("m", with_optimizer=True)
    engine.memory.residency.offload_all_but([])
    moved = device.num_moves
    away = engine.capture("m", with_optimizer=True)  # needs no trip to the device
    assert device.num_moves == moved == 4
    engine.memory.residency.use(["m"], max_bytes=None)
    back = engine.capture("m", with_optimizer=True)
    for there in (away, back):
        assert torch.equal(there.adapter.flat, state.adapter.flat)
        assert there.optimizer is not None
        assert state.optimizer is not None
        for name, tensor in state.optimizer.tensors.items():
            assert torch.equal(there.optimizer.tensors[name], tensor)
    assert torch.equal(model.gradient.flat, gradient)
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in model.adapter.tensors())
    run(engine, "m", one)
    assert not torch.equal(model.gradient.flat, gradient)


def test_a_move_that_finds_no_room_changes_nothing(base: BaseModel) -> None:
    def full(tensor: Tensor) -> Tensor:
        copies.append(tensor)
        if len(copies) > 2:
            raise torch.OutOfMemoryError
        return tensor.clone()

    copies: list[Tensor] = []
    engine = TrainingEngine(base, max_tokens_per_microbatch=100)
    create(engine, "m")
    run(engine, "m", batch(engine, [9]))
    engine.optim_step("m", ADAM)
    model = engine.models["m"]
    before = model.adapter, model.gradient, model.optimizer
    with pytest.raises(torch.OutOfMemoryError):
        model.move(full)
    assert (model.adapter, model.gradient, model.optimizer) == before


@pytest.mark.gpu
def test_cuda_models_wait_in_pinned_memory_and_come_back_as_they_were() -> None:
    residency = Residency.on(torch.device("cuda"))
    tensor = torch.randn(1000, device="cuda")

    class One:
        num_bytes = tensor.nbytes
        here = tensor

        def move(self, move: object) -> None:
            self.here = move(self.here)  # type: ignore[operator]

    one = One()
    residency.add("m", one)
    residency.offload_all_but([])
    assert one.here.is_pinned()
    assert torch.equal(one.here, tensor.cpu())
    residency.use(["m"], max_bytes=None)
    assert one.here.device.type == "cuda"
    assert torch.equal(one.here, tensor)
