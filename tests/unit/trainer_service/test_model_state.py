"""Memory of a model: it takes what it needs, when it needs it, and nothing of other models."""

import torch

from tests.unit.trainer_service.engines import ADAM, batch, create, run
from tinsmith.modeling.base_model import BaseModel
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.memory import Allocations


def test_buffers_come_when_they_are_needed_and_go_with_the_model(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=100)
    one, forward = batch(engine, [9, 20]), batch(engine, [9], forward_only=True)
    with Allocations() as allocations:

        def buffers() -> float:
            return allocations.live_bytes / engine.models["m"].adapter.num_bytes

        create(engine, "m")
        run(engine, "m", forward)
        assert 1 <= buffers() < 1.05
        run(engine, "m", one)
        assert 2 <= buffers() < 2.05
        engine.optim_step("m", ADAM)
        assert 4 <= buffers() < 4.05
        assert engine.models["m"].num_bytes == 4 * engine.models["m"].adapter.num_bytes
        engine.delete_model("m")
        assert allocations.live_bytes < 1000


def test_64_models_in_training_take_their_own_buffers_and_5_percent_at_most(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=200)
    one = batch(engine, [5])
    with Allocations() as allocations:
        for n in range(64):
            create(engine, f"m{n}")
        engine.forward_backward([(f"m{n}", one) for n in range(64)])
        for n in range(64):
            engine.optim_step(f"m{n}", ADAM)
        own = 4 * 64 * engine.models["m0"].adapter.num_bytes
        assert own <= allocations.live_bytes <= 1.05 * own


def test_a_step_touches_no_other_model(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=200)
    one = batch(engine, [9])
    for model_id in ("a", "b"):
        create(engine, model_id)
        run(engine, model_id, one)
        engine.optim_step(model_id, ADAM)
        run(engine, model_id, one)
    b = engine.models["b"]
    assert b.gradient is not None
    before = engine.capture("b", with_optimizer=True), b.gradient.flat.clone()
    versions = b.adapter.flat._version, b.gradient.flat._version
    engine.optim_step("a", ADAM)
    after = engine.capture("b", with_optimizer=True)
    assert (b.adapter.flat._version, b.gradient.flat._version) == versions
    assert torch.equal(after.adapter.flat, before[0].adapter.flat)
    assert torch.equal(b.gradient.flat, before[1])
    assert before[0].optimizer is not None
    assert after.optimizer is not None
    for name, tensor in before[0].optimizer.tensors.items():
        assert torch.equal(after.optimizer.tensors[name], tensor)


def test_a_model_without_a_step_captures_the_optimizer_that_its_first_step_would_begin_with(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=200)
    create(engine, "m")
    state = engine.capture("m", with_optimizer=True)
    assert engine.models["m"].optimizer is None
    assert state.optimizer is not None
    assert not any(tensor.any() for tensor in state.optimizer.tensors.values())
    create(engine, "copy")
    engine.restore("copy", state, with_optimizer=True)
    one = batch(engine, [9])
    for model_id in ("m", "copy"):
        run(engine, model_id, one)
        engine.optim_step(model_id, ADAM)
    assert torch.equal(engine.models["m"].adapter.flat, engine.models["copy"].adapter.flat)
