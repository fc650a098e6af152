"""The engine against the slow oracle, and its promises about neighbours, halves and failures."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.batches import datum, random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.support.oracle import Oracle
from tinsmith.errors import FailedPrecondition, InvalidRequest
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import types_pb2
from trainer_service.engine.batch import Batch, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.optimizers import AdamParams, DimuonParams
from trainer_service.objectives.losses import LOSS_FNS, Targets
from trainer_service.requests import batch_of

ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)
LENGTHS = (9, 4, 4, 17)


@pytest.fixture
def engine(base: BaseModel) -> TrainingEngine:
    return TrainingEngine(base, max_tokens_per_microbatch=20)


def create(engine: TrainingEngine, model_id: str, **config: object) -> None:
    """A model whose B is not zero, so that every gradient lives."""
    engine.create_model(model_id, AdapterConfig(**{"rank": 4, "seed": 1, **config}), "adamw")  # type: ignore[arg-type]
    torch.manual_seed(2)
    with torch.no_grad():
        for weights in engine.models[model_id].adapter.weights.values():
            weights.b_O_R.normal_(0, 0.05)


def batch(
    engine: TrainingEngine, data: list[types_pb2.Datum], loss_fn: str = "cross_entropy", **kwargs: object
) -> Batch:
    return batch_of(request(data, loss_fn, **kwargs), engine.limits)  # type: ignore[arg-type]


def run(engine: TrainingEngine, model_id: str, one: Batch) -> Output:
    (output,) = engine.forward_backward([(model_id, one)])
    assert isinstance(output, Output), output
    return output


def gradient(engine: TrainingEngine, model_id: str) -> torch.Tensor:
    model = engine.models[model_id]
    return torch.zeros_like(model.adapter.flat) if model.gradient is None else model.gradient.flat.clone()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def sparse_2d(length: int, k: int, seed: int) -> types_pb2.Datum:
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(length, k)).astype(np.float32) * (rng.random((length, k)) < 0.5)
    return datum(
        rng.integers(VOCAB_SIZE, size=length).tolist(),
        target_tokens=rng.integers(VOCAB_SIZE, size=(length, k)),
        weights=weights.astype(np.float32),
    )


@pytest.mark.parametrize("loss_fn", [*LOSS_FNS, "cross_entropy 2-D"])
def test_every_loss_and_gradient_equals_the_oracle(
    engine: TrainingEngine, model_folder: Path, tmp_path: Path, loss_fn: str
) -> None:
    create(engine, "m")
    name = loss_fn.split()[0]
    if loss_fn.endswith("2-D"):
        data = [sparse_2d(length, k, seed) for seed, (length, k) in enumerate(zip(LENGTHS, (3, 1, 3, 2), strict=True))]
        data.append(random_datum(6, 9, vocab_size=VOCAB_SIZE))  # one batch may mix both
    else:
        data = [
            random_datum(n, seed, vocab_size=VOCAB_SIZE, policy=name != "cross_entropy")
            for seed, n in enumerate(LENGTHS)
        ]
        for one in data:
            for mask in {"sequence_ratio_mask", "sampled_mask"} & {*LOSS_FNS[name].required}:
                one.loss_fn_inputs[mask].CopyFrom(from_numpy(np.ones(one.loss_fn_inputs["advantages"].shape[0], "f4")))
    ours = batch(engine, data, name)
    output = run(engine, "m", ours)

    oracle = Oracle(model_folder, engine.models["m"].adapter, tmp_path)
    loss_spec = LOSS_FNS[name]

    def loss(datums=ours.datums) -> torch.Tensor:
        total = torch.zeros(())
        for one in datums:
            p = oracle.logprobs(one.tokens_N.tolist(), torch.tensor(one.targets))
            arrays = {key: torch.tensor(value).ravel() for key, value in one.inputs.items()}
            total = total + loss_spec.of_targets(Targets(p.ravel(), arrays, ours.loss_config, [p.numel()])).sum()
        return total

    theirs = loss().item()
    assert output.metrics["loss:sum"] == pytest.approx(theirs, rel=1e-5, abs=1e-4)
    for one, got in zip(ours.datums, output.logprobs, strict=True):
        expected = oracle.logprobs(one.tokens_N.tolist(), torch.tensor(one.targets)).detach().numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)
    grads = oracle.gradients(loss)
    for mine, theirs_grad in zip(engine.models["m"].need_gradient().tensors(), grads, strict=True):
        assert_near(mine, theirs_grad)


def test_two_half_batches_equal_one_whole(engine: TrainingEngine) -> None:
    data = [random_datum(n, seed, vocab_size=VOCAB_SIZE) for seed, n in enumerate(LENGTHS)]
    create(engine, "whole")
    create(engine, "halves")
    run(engine, "whole", batch(engine, data))
    run(engine, "halves", batch(engine, data[:2]))
    run(engine, "halves", batch(engine, data[2:]))
    assert_near(gradient(engine, "halves"), gradient(engine, "whole"))


def test_tenants_of_different_rank_in_one_micro_batch_equal_each_alone(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=10_000)
    configs = {"a": {"rank": 2}, "b": {"rank": 7, "train_mlp": False}, "c": {"rank": 4, "train_unembed": False}}
    works = []
    for n, (model_id, config) in enumerate(configs.items()):
        create(engine, model_id, **config)
        policy = model_id == "b"
        data = [random_datum(length, 10 * n + length, vocab_size=VOCAB_SIZE, policy=policy) for length in LENGTHS]
        works.append((model_id, batch(engine, data, "ppo" if policy else "cross_entropy")))
    together = engine.forward_backward(works)
    joint = {model_id: gradient(engine, model_id) for model_id in configs}
    for (model_id, one), output in zip(works, together, strict=True):
        assert isinstance(output, Output)
        engine.models[model_id].clear_gradient()
        alone = run(engine, model_id, one)
        assert_near(gradient(engine, model_id), joint[model_id])
        assert output.metrics == pytest.approx(alone.metrics, rel=1e-5)
        for x, y in zip(output.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_weight_decay_of_one_tenant_leaves_the_other_untouched(engine: TrainingEngine) -> None:
    create(engine, "a")
    create(engine, "b", rank=8)
    before = engine.models["b"].adapter.flat.clone()
    run(engine, "a", batch(engine, [random_datum(5, 0, vocab_size=VOCAB_SIZE)]))
    a = engine.models["a"].adapter.flat.clone()
    engine.optim_step("a", AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.5, 0.0))
    assert torch.equal(engine.models["b"].adapter.flat, before)
    assert not torch.equal(engine.models["a"].adapter.flat, a)


def test_optim_step_equals_torch_adamw_on_the_adapters_own_tensors(engine: TrainingEngine) -> None:
    create(engine, "m")
    model = engine.models["m"]
    parameters = [torch.nn.Parameter(tensor.detach().clone()) for tensor in model.adapter.tensors()]
    reference = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for seed in range(3):
        run(engine, "m", batch(engine, [random_datum(8, seed, vocab_size=VOCAB_SIZE)]))
        for parameter, grad in zip(parameters, model.need_gradient().tensors(), strict=True):
            parameter.grad = grad.clone()
        reference.step()
        engine.optim_step("m", AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.1, 0.0))
        for ours, theirs in zip(model.adapter.tensors(), parameters, strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-7)
    assert model.step == 3
    assert not gradient(engine, "m").any()


def test_forward_only_returns_logprobs_and_adds_no_gradient(engine: TrainingEngine) -> None:
    create(engine, "m")
    data = [random_datum(n, seed, vocab_size=VOCAB_SIZE) for seed, n in enumerate(LENGTHS)]
    forward = run(engine, "m", batch(engine, data, forward_only=True))
    assert not gradient(engine, "m").any()
    backward = run(engine, "m", batch(engine, data))
    assert forward.metrics["loss:sum"] == pytest.approx(backward.metrics["loss:sum"], rel=1e-6)


def test_a_loss_that_is_not_finite_fails_alone_and_adds_nothing(engine: TrainingEngine) -> None:
    create(engine, "good")
    create(engine, "bad")
    good = batch(engine, [random_datum(5, 0, vocab_size=VOCAB_SIZE)])
    bad = batch(
        engine,
        [datum([1, 2], target_tokens=[2, 3], logprobs=np.float32([-1e3, -1]), advantages=np.float32([1, 1]))],
        "importance_sampling",
    )
    refused, fine = engine.forward_backward([("bad", bad), ("good", good)])
    assert isinstance(refused, InvalidRequest)
    assert "not finite" in str(refused)
    assert isinstance(fine, Output)
    assert not gradient(engine, "bad").any()
    assert gradient(engine, "good").any()


def test_after_a_failed_chunk_the_step_is_refused_once_and_clears_the_gradients(engine: TrainingEngine) -> None:
    create(engine, "m")
    one = batch(engine, [random_datum(5, 0, vocab_size=VOCAB_SIZE)])
    run(engine, "m", one)
    engine.taint("m", "data[3] was wrong", seq_id=7)
    before = engine.models["m"].adapter.flat.clone()
    with pytest.raises(FailedPrecondition, match=r"data\[3\] was wrong"):
        engine.optim_step("m", ADAM)
    assert torch.equal(engine.models["m"].adapter.flat, before)
    assert not gradient(engine, "m").any()
    run(engine, "m", one)
    assert engine.optim_step("m", ADAM)["grad_norm:mean"] > 0


def test_a_step_without_gradients_is_a_step_of_zero(engine: TrainingEngine) -> None:
    create(engine, "m")
    before = engine.models["m"].adapter.flat.clone()
    assert engine.optim_step("m", ADAM) == {"grad_norm:mean": 0.0}
    assert torch.equal(engine.models["m"].adapter.flat, before)


def test_a_restored_model_continues_as_the_first_would_have(engine: TrainingEngine) -> None:
    data = [random_datum(7, 0, vocab_size=VOCAB_SIZE)]
    create(engine, "m")
    run(engine, "m", batch(engine, data))
    engine.optim_step("m", ADAM)
    state = engine.capture("m", with_optimizer=True)
    engine.create_model("copy", AdapterConfig(rank=4), "adamw")
    engine.restore("copy", state, with_optimizer=True)
    engine.create_model("fresh", AdapterConfig(rank=4), "adamw")
    engine.restore("fresh", state, with_optimizer=False)
    for model_id in ("m", "copy", "fresh"):
        run(engine, model_id, batch(engine, data))
        engine.optim_step(model_id, ADAM)
    flats = {model_id: engine.models[model_id].adapter.flat for model_id in ("m", "copy", "fresh")}
    assert torch.equal(flats["m"], flats["copy"])
    assert not torch.equal(flats["m"], flats["fresh"])
    assert engine.models["fresh"].step == 2


def test_a_state_of_another_rank_or_without_optimizer_is_refused(engine: TrainingEngine) -> None:
    create(engine, "m")
    engine.create_model("other", AdapterConfig(rank=8), "adamw")
    with pytest.raises(InvalidRequest, match=r"rank 4.*rank 8"):
        engine.restore("other", engine.capture("m", with_optimizer=True), with_optimizer=True)
    with pytest.raises(InvalidRequest, match="no optimizer state"):
        engine.restore("m", engine.capture("m", with_optimizer=False), with_optimizer=True)


def test_a_captured_state_does_not_move_with_the_model(engine: TrainingEngine) -> None:
    create(engine, "m")
    state = engine.capture("m", with_optimizer=True)
    before = state.adapter.flat.clone()
    run(engine, "m", batch(engine, [random_datum(5, 0, vocab_size=VOCAB_SIZE)]))
    engine.optim_step("m", ADAM)
    assert torch.equal(state.adapter.flat, before)


def test_an_unknown_optimizer_is_refused(engine: TrainingEngine) -> None:
    with pytest.raises(InvalidRequest, match="optimizer: 'sgd' is not one of adamw, dimuon"):
        engine.create_model("m", AdapterConfig(rank=4), "sgd")


DIMUON = DimuonParams(learning_rate=1e-2, beta1=0.9, grad_clip_norm=0.0)


def test_models_of_both_optimizers_train_in_one_engine_and_refuse_each_others_parameters(
    engine: TrainingEngine,
) -> None:
    steps = {"adam": ADAM, "dimuon": DIMUON}
    for model_id, params in steps.items():
        engine.create_model(model_id, AdapterConfig(rank=4, seed=1), params.kind)
    works = [
        (model_id, batch(engine, [random_datum(n, n, vocab_size=VOCAB_SIZE, positive=True) for n in LENGTHS]))
        for model_id in steps
    ]
    losses = {model_id: [] for model_id in steps}
    for _ in range(6):
        for (model_id, _), output in zip(works, engine.forward_backward(works), strict=True):
            assert isinstance(output, Output)
            losses[model_id].append(output.metrics["loss:sum"])
            assert engine.optim_step(model_id, steps[model_id])["grad_norm:mean"] > 0
    for model_id, values in losses.items():
        assert values[-1] < 0.9 * values[0], model_id
    for model_id, other in (("adam", DIMUON), ("dimuon", ADAM)):
        run(engine, model_id, works[0][1])
        mine = steps[model_id].kind
        with pytest.raises(InvalidRequest, match=f"are for optimizer '{other.kind}', but .* optimizer '{mine}'"):
            engine.optim_step(model_id, other)
        assert gradient(engine, model_id).any()


def test_a_restored_dimuon_continues_as_the_first_would_have_and_is_not_loaded_into_adamw(
    engine: TrainingEngine,
) -> None:
    data = [random_datum(7, 0, vocab_size=VOCAB_SIZE)]
    engine.create_model("m", AdapterConfig(rank=4, seed=1), "dimuon")
    for _ in range(2):
        run(engine, "m", batch(engine, data))
        engine.optim_step("m", DIMUON)
    state = engine.capture("m", with_optimizer=True)
    engine.create_model("copy", AdapterConfig(rank=4), "dimuon")
    engine.restore("copy", state, with_optimizer=True)
    for model_id in ("m", "copy"):
        run(engine, model_id, batch(engine, data))
        engine.optim_step(model_id, DIMUON)
    assert torch.equal(engine.models["m"].adapter.flat, engine.models["copy"].adapter.flat)
    engine.create_model("adam", AdapterConfig(rank=4), "adamw")
    with pytest.raises(InvalidRequest, match="the checkpoint's optimizer is 'dimuon', the model's 'adamw'"):
        engine.restore("adam", state, with_optimizer=True)
    engine.restore("adam", state, with_optimizer=False)
