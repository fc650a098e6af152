"""Many tenants in one micro-batch: whatever they are and however their datums are dealt out, each is as if alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.unit.trainer_service.custom_losses import sent, traced
from tests.unit.trainer_service.engines import assert_near, gradient
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import trainer_pb2, types_pb2
from trainer_service.engine.batch import CUSTOM, Batch, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.optimizers import AdamParams, DimuonParams
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.requests import batch_of
from trainer_service.scheduling.packing import DeficitRoundRobin

GROUPS = ({}, {"train_mlp": False}, {"train_attn": False}, {"train_unembed": False})
CONFIGS = {"ppo": {"clip_low_threshold": 0.5}, "dro": {"beta": 0.2}, "cispo": {"clip_high_threshold": 1.1}}
LENGTHS = (3, 5, 5, 12)


@dataclass(frozen=True, slots=True)
class Tenant:
    model_id: str
    batch: Batch


def tenants(engine: TrainingEngine) -> Sequence[Tenant]:
    """16 models: every loss twice, a custom one too; ranks 1 to 16, four sets of layers, every fourth forward-only."""
    made = []
    for n, loss_fn in enumerate([*LOSS_FNS, CUSTOM] * 2):
        model_id = f"m{n}"
        config = AdapterConfig(rank=n + 1, seed=n, **GROUPS[n % 4])
        engine.create_model(model_id, config, "dimuon" if n % 5 == 0 else "adamw")
        torch.manual_seed(n)
        with torch.no_grad():
            for weights in engine.models[model_id].adapter.weights.values():
                weights.b_O_R.normal_(0, 0.05)  # so that every gradient lives
        made.append(Tenant(model_id, batch_of(message(loss_fn, n, forward_only=n % 4 == 3), engine.limits)))
    return made


def message(loss_fn: str, seed: int, *, forward_only: bool) -> trainer_pb2.ForwardBackwardRequest:
    policy = loss_fn not in ("cross_entropy", CUSTOM)
    data = [
        random_datum(length, 100 * seed + n, vocab_size=VOCAB_SIZE, policy=policy) for n, length in enumerate(LENGTHS)
    ]
    if policy:
        for one in data:
            _add_masks(one, loss_fn)
    made = request(data, loss_fn, config=CONFIGS.get(loss_fn) if seed % 2 else None, forward_only=forward_only)
    if loss_fn == CUSTOM:
        made.custom_loss.CopyFrom(sent(traced(lambda logprobs, weights: (-(logprobs * weights).mean(), {}), weights=1)))
    return made


def _add_masks(one: types_pb2.Datum, loss_fn: str) -> None:
    for name in {"sequence_ratio_mask", "sampled_mask"} & {*LOSS_FNS[loss_fn].required}:
        mask = np.ones(one.loss_fn_inputs["advantages"].shape[0], np.float32)
        one.loss_fn_inputs[name].CopyFrom(from_numpy(mask))


@pytest.fixture
def engine(base: BaseModel) -> TrainingEngine:
    return TrainingEngine(base, max_tokens_per_microbatch=1000)


def alone(engine: TrainingEngine, tenant: Tenant) -> tuple[Output, torch.Tensor]:
    """The output and the gradient, which is cleared."""
    (output,) = engine.forward_backward([(tenant.model_id, tenant.batch)])
    assert isinstance(output, Output), output
    expected = gradient(engine, tenant.model_id)
    engine.models[tenant.model_id].clear_gradient()
    return output, expected


def assert_same(output: object, expected: Output) -> None:
    assert isinstance(output, Output), output
    assert output.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
    for ours, theirs in zip(output.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def in_micro_batches(engine: TrainingEngine, all_tenants: Sequence[Tenant], budget: int) -> dict[str, object]:
    """As the compute thread does it: the fair order, cut at the budget."""
    batches = begun(all_tenants)
    ring = DeficitRoundRobin()
    for batch in batches.values():
        ring.add(batch)
    while micro_batch := ring.next_micro_batch(budget):
        engine.passes.run(micro_batch)
    return {model_id: engine.passes.finish(batch) for model_id, batch in batches.items()}


def begun(all_tenants: Sequence[Tenant]) -> dict[str, Batch]:
    return {tenant.model_id: replace(tenant.batch, model_id=tenant.model_id) for tenant in all_tenants}


@pytest.mark.parametrize("budget", [1000, 64, 7])
def test_sixteen_tenants_of_every_kind_in_shared_micro_batches_equal_each_alone(
    engine: TrainingEngine, budget: int
) -> None:
    """At 1000 tokens all datums with a gradient are in one micro-batch."""
    all_tenants = tenants(engine)
    expected = {tenant.model_id: alone(engine, tenant) for tenant in all_tenants}
    for model_id, output in in_micro_batches(engine, all_tenants, budget).items():
        theirs, their_gradient = expected[model_id]
        assert_same(output, theirs)
        assert_near(gradient(engine, model_id), their_gradient, 1e-5)
        assert engine.models[model_id].need_gradient().flat.any() == their_gradient.any()


@pytest.mark.parametrize("seed", range(4))
def test_gradients_over_any_split_of_batches_into_micro_batches_are_equal(engine: TrainingEngine, seed: int) -> None:
    all_tenants = [tenant for tenant in tenants(engine) if not tenant.batch.forward_only][:5]
    expected = {tenant.model_id: alone(engine, tenant) for tenant in all_tenants}
    batches = begun(all_tenants)
    datums = [(tenant.model_id, index) for tenant in all_tenants for index in range(len(tenant.batch.datums))]
    random_ = random.Random(seed)
    random_.shuffle(datums)
    while datums:
        taken = [datums.pop() for _ in range(min(len(datums), random_.randint(1, 6)))]
        engine.passes.run([(batches[model_id], [index]) for model_id, index in taken])
    for model_id, batch in batches.items():
        theirs, their_gradient = expected[model_id]
        assert_same(engine.passes.finish(batch), theirs)
        assert_near(gradient(engine, model_id), their_gradient, 1e-5)


def test_weight_decay_and_moments_of_one_tenant_never_touch_another(engine: TrainingEngine) -> None:
    """Models step between the micro-batches of others; those that do not step stay as they are, to the last bit."""
    decaying, dimuon, still, reading = (tenants(engine)[n] for n in (1, 0, 2, 3))
    assert reading.batch.forward_only
    flats = {tenant.model_id: engine.models[tenant.model_id].adapter.flat for tenant in (still, reading)}
    before = {model_id: flat.clone() for model_id, flat in flats.items()}
    for _ in range(3):
        batches = list(begun([decaying, dimuon, still, reading]).values())
        for indices in ([0, 1], [2, 3]):
            engine.passes.run([(batch, indices) for batch in batches if not batch.forward_only])
            engine.passes.run([(batch, indices) for batch in batches if batch.forward_only])
        assert all(isinstance(engine.passes.finish(batch), Output) for batch in batches)
        engine.optim_step(decaying.model_id, AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.5, 0.0))
        engine.optim_step(dimuon.model_id, DimuonParams(learning_rate=1e-2, beta1=0.9, grad_clip_norm=0.0))
    for model_id, flat in flats.items():
        assert torch.equal(flat, before[model_id])
    accumulated = gradient(engine, still.model_id)
    engine.models[still.model_id].clear_gradient()
    assert_near(accumulated, 3 * alone(engine, still)[1], 1e-5)
