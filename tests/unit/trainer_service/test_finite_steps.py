"""Numbers never leave float32 by a step: it is refused, and changes nothing, or it is made and all are finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batches import datum, random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.unit.trainer_service.engines import ADAM, create, run
from tinsmith import errors
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import trainer_pb2, types_pb2
from trainer_service.engine.batch import Batch
from trainer_service.engine.engine import CapturedState, TrainingEngine
from trainer_service.engine.model_state import ModelState
from trainer_service.engine.optimizers import AdamParams, DimuonParams, Params, clip_gradient
from trainer_service.requests import batch_of, params_of

DIMUON = DimuonParams(learning_rate=1e-2, beta1=0.9, grad_clip_norm=0.0)
KINDS: dict[str, Params] = {"adamw": ADAM, "dimuon": DIMUON}


@pytest.fixture(params=[*KINDS, "full"])
def engine(request: pytest.FixtureRequest, model_folder: Path) -> TrainingEngine:
    """With a model "m" of this kind, which has taken a step."""
    full = request.param == "full"
    base = BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32, trainable=full)
    engine = TrainingEngine(base, max_tokens_per_microbatch=64)
    engine.create_model("m", AdapterConfig(rank=0 if full else 4, seed=1), "adamw" if full else request.param)
    run(engine, "m", batch(engine))
    engine.optim_step("m", params_for(engine))
    return engine


def params_for(engine: TrainingEngine, **changed: float) -> Params:
    return dataclasses.replace(KINDS[engine.models["m"].optimizer_kind], **changed)  # type: ignore[arg-type]


def batch(engine: TrainingEngine, *, seed: int = 0, scale: float = 1.0) -> Batch:
    data = [random_datum(length, seed + length, vocab_size=VOCAB_SIZE) for length in (9, 5)]
    for one in data:
        weights = one.loss_fn_inputs["weights"]
        weights.dense = (scale * np.ones(len(weights.dense) // 4)).astype("<f4").tobytes()
    return batch_of(request(data), engine.limits)


def everything(state: CapturedState) -> list[torch.Tensor]:
    assert state.optimizer is not None
    return [state.adapter.flat, *state.optimizer.tensors.values()]


def assert_refused_and_unchanged(engine: TrainingEngine, params: Params, match: str) -> None:
    before = engine.capture("m", with_optimizer=True)
    with pytest.raises(errors.NotFinite, match=match):
        engine.optim_step("m", params)
    after = engine.capture("m", with_optimizer=True)
    assert after.step == before.step
    for one, other in zip(everything(before), everything(after), strict=True):
        assert torch.equal(one, other)
    gradient = engine.models["m"].gradient
    assert gradient is not None
    assert not gradient.flat.any()


def assert_trains_on(engine: TrainingEngine) -> None:
    before = engine.capture("m", with_optimizer=False)
    run(engine, "m", batch(engine))
    engine.optim_step("m", params_for(engine))
    after = engine.capture("m", with_optimizer=True)
    assert after.step == before.step + 1
    assert not torch.equal(before.adapter.flat, after.adapter.flat)
    assert all(tensor.isfinite().all() for tensor in everything(after))


@pytest.mark.parametrize("eps", [0.0, 1e-50])
def test_an_eps_of_zero_in_float32_is_refused_by_its_name(eps: float) -> None:
    with pytest.raises(errors.InvalidRequest, match=rf"adam_params\.eps: {eps} is outside \[1\.2e-38, 3\.4e\+38\)"):
        params_of(trainer_pb2.OptimStepRequest(adam_params=trainer_pb2.AdamParams(eps=eps)))


def test_absent_settings_are_the_defaults_of_the_sdk_and_zero_is_zero() -> None:
    adam = params_of(trainer_pb2.OptimStepRequest(adam_params=trainer_pb2.AdamParams()))
    assert adam == AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
    asked = trainer_pb2.AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0)
    assert params_of(trainer_pb2.OptimStepRequest(adam_params=asked)) == AdamParams(0, 0, 0, 1e-12, 0, 0)
    dimuon = trainer_pb2.DimuonParams(learning_rate=0.1)
    assert params_of(trainer_pb2.OptimStepRequest(dimuon_params=dimuon)) == DimuonParams(0.1, 0.9, 0.0)
    with pytest.raises(errors.InvalidRequest, match=r"dimuon_params\.learning_rate: is missing"):
        params_of(trainer_pb2.OptimStepRequest(dimuon_params=trainer_pb2.DimuonParams(beta1=0.5)))


def test_a_step_that_would_lead_out_of_float32_is_refused_and_changes_nothing(engine: TrainingEngine) -> None:
    run(engine, "m", batch(engine))
    assert_refused_and_unchanged(
        engine, params_for(engine, learning_rate=1e30), r"parameters as large as .*e\+.* a learning rate \(1e\+30\)"
    )
    assert_trains_on(engine)


@pytest.mark.parametrize("engine", ["adamw", "full"], indirect=True)
def test_a_step_whose_product_overflows_before_it_is_divided_is_refused_and_changes_nothing(
    engine: TrainingEngine,
) -> None:
    run(engine, "m", batch(engine))
    params = AdamParams(learning_rate=3e38, beta1=0.0, beta2=0.95, eps=3e38, weight_decay=0.0, grad_clip_norm=0.0)
    assert_refused_and_unchanged(engine, params, r"a learning rate \(3e\+38\)")
    assert_trains_on(engine)


def test_a_gradient_of_infinite_norm_touches_no_moment(engine: TrainingEngine) -> None:
    run(engine, "m", batch(engine, scale=1e21))
    assert_refused_and_unchanged(engine, params_for(engine), r"the gradient has a norm of .*e\+2\d.*Set grad_clip_norm")
    assert_trains_on(engine)


def test_sums_of_gradients_that_overflow_are_refused(engine: TrainingEngine) -> None:
    for _ in range(3):
        model = engine.models["m"]
        model.need_gradient().flat.add_(2e38)
    assert_refused_and_unchanged(engine, params_for(engine, grad_clip_norm=1.0), "the gradient is not finite")


def test_clipping_makes_a_norm_that_overflows_finite(engine: TrainingEngine) -> None:
    run(engine, "m", batch(engine, scale=1e21))
    norm = engine.optim_step("m", params_for(engine, grad_clip_norm=1.0))["grad_norm:mean"]
    assert 1e18 < norm < math.inf
    assert_trains_on(engine)


def test_a_huge_gradient_is_clipped_to_what_a_small_one_is() -> None:
    torch.manual_seed(0)
    small = torch.randn(1000)
    huge = small * 1e30
    norm = clip_gradient(huge, 1.0)
    assert norm == pytest.approx(1e30 * small.norm().item(), rel=1e-6)
    clip_gradient(small, 1.0)
    torch.testing.assert_close(huge, small)


def test_a_limit_of_clipping_that_is_itself_too_large_does_not_help() -> None:
    with pytest.raises(errors.NotFinite, match=r"has a norm of 1\.41e\+30"):
        clip_gradient(torch.full((2,), 1e30), 1e29)


def test_a_step_that_only_might_lead_too_far_is_made_with_the_same_bits(base: BaseModel) -> None:
    """With an eps so small the bound says nothing, and the step is tried on copies."""
    engine = TrainingEngine(base, max_tokens_per_microbatch=64)
    tiny = dataclasses.replace(ADAM, eps=1e-30)
    states = {}
    for model_id in ("m", "other"):
        create(engine, model_id)
        for seed in range(3):
            run(engine, model_id, batch(engine, seed=seed))
            if model_id == "m":
                engine.optim_step(model_id, tiny)
            else:
                model = engine.models[model_id]
                model.need_optimizer().step(model.adapter.flat, model.need_gradient().flat, tiny)
                model.clear_gradient()
        states[model_id] = engine.capture(model_id, with_optimizer=True)
    for one, other in zip(everything(states["m"]), everything(states["other"]), strict=True):
        assert torch.equal(one, other)


def test_a_model_whose_parameters_have_diverged_says_how_to_get_out(engine: TrainingEngine) -> None:
    good = engine.capture("m", with_optimizer=True)
    with torch.no_grad():
        engine.models["m"].adapter.flat.fill_(math.nan)
    result = engine.forward_backward([("m", batch(engine))])[0]
    assert isinstance(result, errors.NotFinite)
    assert "Load a checkpoint" in result.message
    with pytest.raises(errors.FailedPrecondition, match="a forward_backward before it failed"):
        engine.optim_step("m", params_for(engine))
    engine.models["m"].farthest = math.inf  # nobody has looked, as after a restart
    with pytest.raises(errors.NotFinite, match=r"before it\. Load a checkpoint"):
        engine.optim_step("m", params_for(engine))
    engine.restore("m", good, with_optimizer=True)
    assert_trains_on(engine)


def test_finite_parameters_that_have_grown_too_large_are_not_blamed_on_the_request(engine: TrainingEngine) -> None:
    good = engine.capture("m", with_optimizer=True)
    with torch.no_grad():
        engine.models["m"].adapter.flat.fill_(9e17)
    result = engine.forward_backward([("m", batch(engine))])[0]
    assert isinstance(result, errors.NotFinite)
    assert "Load a checkpoint" in result.message
    engine.restore("m", good, with_optimizer=True)
    result = engine.forward_backward([("m", batch(engine, scale=1e38))])[0]
    assert isinstance(result, errors.InvalidRequest)
    assert "Look for numbers that are too large in loss_fn_inputs" in result.message
    assert result.metadata["field"] == "data"


def test_second_moments_that_have_overflowed_are_seen_at_the_first_step_after_a_restart(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=64)
    create(engine, "m")
    run(engine, "m", batch(engine))
    engine.optim_step("m", ADAM)
    state = engine.capture("m", with_optimizer=True)
    assert state.optimizer is not None
    state.optimizer.tensors["exp_avg_sq"][3] = math.inf
    engine.restore("m", state, with_optimizer=True)
    run(engine, "m", batch(engine))
    with pytest.raises(errors.NotFinite, match="moments were not finite"):
        engine.optim_step("m", ADAM)


class Flat:
    """Weights of nothing, for an optimizer: one matrix of 2 x 3, and one of 3 x 2."""

    config = AdapterConfig(rank=2)

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [("a", (2, 3)), ("b", (3, 2))]

    def tensors(self) -> list[torch.Tensor]:
        return []

    def like(self, flat: torch.Tensor) -> Any:
        return Flat(flat)


MAGNITUDES = st.floats(-45, 38).map(lambda power: 10.0**power) | st.just(0.0)
RATES = st.floats(-20, 30).map(lambda power: 10.0**power) | st.sampled_from([0.0, 1.0])
DECAYS = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.9, 0.999])
ADAMS = st.builds(
    AdamParams, RATES, DECAYS, DECAYS, st.floats(-37, 38).map(lambda power: 10.0**power), RATES, st.just(0.0)
)
DIMUONS = st.builds(DimuonParams, RATES, DECAYS, st.just(0.0))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["adamw", "dimuon"]))
def test_the_foreseen_size_is_never_below_the_real_one(data: st.DataObject, kind: str) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    model = ModelState(Flat(torch.from_numpy(rng.normal(size=12).astype(np.float32))), kind)  # type: ignore[arg-type]
    model.look()
    made = 0
    for _ in range(data.draw(st.integers(1, 6))):
        params: Params = data.draw(ADAMS if kind == "adamw" else DIMUONS)
        scales = rng.choice(np.array([0.0, 1e-6, 1.0]), size=12) * data.draw(MAGNITUDES)
        gradient = torch.from_numpy((rng.normal(size=12) * scales).astype(np.float32))
        try:
            norm = clip_gradient(gradient, params.grad_clip_norm)
        except errors.NotFinite:
            continue
        foreseen = model.foreseen(norm, params)
        if foreseen is None:
            continue
        model.need_optimizer().step(model.adapter.flat, gradient, params)
        made += 1
        assert model.adapter.flat.abs().max().item() <= foreseen[0]
        assert all(tensor.isfinite().all() for tensor in model.need_optimizer().state().values())
        first, second = _moments(model)
        assert first <= foreseen[1]
        assert second <= foreseen[1] ** 2 * 1.001
        model.farthest, model.farthest_moment = foreseen


def _moments(model: ModelState) -> tuple[float, float]:
    state = model.need_optimizer().state()
    if "momentum" in state:
        return state["momentum"].abs().max().item() / 1.001, 0.0
    return state["exp_avg"].abs().max().item() / 1.001, state["exp_avg_sq"].max().item()


def policy(logprob: float) -> Callable[[TrainingEngine], Batch]:
    tokens = [1, 2, 3, 4]
    one: types_pb2.Datum = datum(
        tokens,
        target_tokens=np.array([2, 3, 4, 5]),
        logprobs=np.full(4, logprob, np.float32),
        advantages=np.ones(4, np.float32),
    )
    return lambda engine: batch_of(request([one], "importance_sampling"), engine.limits)


def test_the_datum_with_the_largest_ratio_is_named(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=8)
    create(engine, "m")
    engine.optim_step("m", ADAM)

    def sampled(seq_id: int, *logprobs: float) -> Batch:
        data = [policy(logprob)(engine).request.data[0] for logprob in logprobs]  # type: ignore[union-attr]
        return batch_of(request(data, "importance_sampling", seq_id=seq_id), engine.limits)

    run(engine, "m", sampled(3, -4.0, -60.0))
    run(engine, "m", sampled(4, -5.0, -5.0, -80.0, -70.0))
    run(engine, "m", sampled(5, -5.0))
    with pytest.raises(errors.NotFinite, match=r"The largest ratio is that of data\[2\] of seq_id 4: e\^7\d\.\d+"):
        engine.optim_step("m", ADAM)
    failed = engine.forward_backward([("m", sampled(7, -5.0, -5.0, -2e3))])[0]
    assert isinstance(failed, errors.InvalidRequest)
    assert "data[2] of seq_id 7: e^1" in failed.message
    assert failed.metadata["field"] == "data[2].loss_fn_inputs.logprobs"


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "stable_reinforce"])
def test_a_datum_is_not_named_for_a_target_that_is_masked(base: BaseModel, loss_fn: str) -> None:
    """A client may have any number as the logprob of a target that was not sampled."""
    engine = TrainingEngine(base, max_tokens_per_microbatch=8)
    create(engine, "m")
    masked, guilty = (policy(logprob)(engine).request.data[0] for logprob in (-5.0, -2e3))  # type: ignore[union-attr]
    name = "weights" if loss_fn == "importance_sampling" else "sampled_mask"
    ones, mask = np.ones(4, np.float32), np.array([0, 1, 1, 1], np.float32)
    masked.loss_fn_inputs["logprobs"].CopyFrom(from_numpy(np.array([-1e30, -5, -5, -5], np.float32)))
    masked.loss_fn_inputs["advantages"].CopyFrom(from_numpy(mask))
    for one, values in ((masked, mask), (guilty, ones)):
        one.loss_fn_inputs[name].CopyFrom(from_numpy(values))
    guilty.loss_fn_inputs["advantages"].CopyFrom(from_numpy(ones * np.float32(-3e38)))
    failed = engine.forward_backward([("m", batch_of(request([masked, guilty], loss_fn, seq_id=7), engine.limits))])[0]
    assert isinstance(failed, errors.InvalidRequest)
    assert "data[1] of seq_id 7: e^1" in failed.message
    assert failed.metadata["field"] == "data[1].loss_fn_inputs.logprobs"
    with pytest.raises(errors.FailedPrecondition, match="failed, seq_id 7"):
        engine.optim_step("m", ADAM)
    weighted = [datum([1, 2, 3, 4], target_tokens=[2, 3, 4, 5], weights=np.full(4, 1e30, np.float32))]
    run(engine, "m", batch_of(request(weighted), engine.limits))
    with pytest.raises(errors.NotFinite, match=r"forward_backward\)$"):
        engine.optim_step("m", ADAM)


def test_a_ratio_that_overflows_the_norm_does_not_freeze_adam(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=64)
    create(engine, "m")
    engine.optim_step("m", ADAM)
    run(engine, "m", policy(-80.0)(engine))
    assert_refused_and_unchanged(engine, ADAM, "ratio:max")
    losses = []
    for _ in range(4):
        losses.append(run(engine, "m", batch(engine)).metrics["loss:sum"])
        engine.optim_step("m", ADAM)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
