"""Mismatch of sampler and trainer in every result: against the formulas, and however a batch is divided."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import tinker
from prometheus_client import CollectorRegistry
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results

from tests.support.batches import datum, random_datum, request
from tests.support.models import VOCAB_SIZE
from tests.unit.trainer_service.engines import batch, create, run
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.tensors import from_numpy, to_numpy
from tinsmith.v1 import types_pb2
from trainer_service.engine.batch import Batch, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.metrics import Metrics
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.objectives.mismatch import Mismatch
from trainer_service.requests import batch_of

KEYS = {"sampler_kl:mean", "ess:mean", "ratio:max"}
MODEL = "m"


def oracle(p: np.ndarray, q: np.ndarray) -> dict[str, float]:
    """Word for word from docs/algorithms.md."""
    d = p.astype(np.float64) - q
    r = np.exp(d)
    return {
        "sampler_kl:mean": (r - 1 - d).mean(),
        "ess:mean": r.sum() ** 2 / (len(r) * (r**2).sum()),
        "ratio:max": r.max(),
    }


def of(p: np.ndarray, q: np.ndarray) -> Mismatch:
    mismatch = Mismatch.of(p, q, np.ones(p.shape, bool))
    assert mismatch is not None
    return mismatch


@pytest.fixture
def engine(base: BaseModel) -> TrainingEngine:
    engine = TrainingEngine(base, max_tokens_per_microbatch=30)
    create(engine, MODEL)
    return engine


def rl_datum(length: int, seed: int, loss_fn: str) -> types_pb2.Datum:
    """A prompt of two tokens, padded with zeros, then sampled tokens, one of which has no advantage."""
    made = random_datum(length, seed, vocab_size=VOCAB_SIZE, policy=True)
    sampled = np.ones(length, np.float32)
    sampled[:2] = 0
    for name in ("logprobs", "advantages"):
        padded = to_numpy(made.loss_fn_inputs[name], field=name) * sampled
        if name == "advantages":
            padded[3] = 0
        made.loss_fn_inputs[name].CopyFrom(from_numpy(padded))
    for name in {"sequence_ratio_mask", "sampled_mask"} & {*LOSS_FNS[loss_fn].required}:
        made.loss_fn_inputs[name].CopyFrom(from_numpy(sampled))
    return made


def rl_batch(engine: TrainingEngine, loss_fn: str, data: list[types_pb2.Datum], *, forward_only: bool = False) -> Batch:
    return batch_of(request(data, loss_fn, forward_only=forward_only), engine.limits)


def expected(data: list[types_pb2.Datum], output: Output) -> dict[str, float]:
    p = np.concatenate([logprobs[2:] for logprobs in output.logprobs])
    q = np.concatenate([to_numpy(one.loss_fn_inputs["logprobs"], field="")[2:] for one in data])
    return oracle(p, q)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("loss_fn", [name for name in LOSS_FNS if name != "cross_entropy"])
def test_every_policy_loss_says_how_far_its_sampled_tokens_are(
    engine: TrainingEngine, loss_fn: str, forward_only: bool
) -> None:
    data = [rl_datum(length, seed, loss_fn) for seed, length in enumerate((5, 20, 9, 30))]
    output = run(engine, MODEL, rl_batch(engine, loss_fn, data, forward_only=forward_only))
    assert {key: output.metrics[key] for key in KEYS} == pytest.approx(expected(data, output), rel=1e-9)


def test_targets_of_weight_0_are_not_compared(engine: TrainingEngine) -> None:
    data = [rl_datum(length, seed, "ppo") for seed, length in enumerate((5, 20))]
    plain = run(engine, MODEL, rl_batch(engine, "ppo", data))
    for one in data:
        logprobs = to_numpy(one.loss_fn_inputs["logprobs"], field="")
        masked = np.concatenate([np.full(2, -50.0, np.float32), logprobs[2:]])  # the prompt has logprobs, too
        weights = (np.arange(logprobs.size) >= 2).astype(np.float32)
        one.loss_fn_inputs["logprobs"].CopyFrom(from_numpy(masked))
        one.loss_fn_inputs["weights"].CopyFrom(from_numpy(weights))
    output = run(engine, MODEL, rl_batch(engine, "ppo", data))
    assert {key: output.metrics[key] for key in KEYS} == pytest.approx({key: plain.metrics[key] for key in KEYS})
    assert output.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"])


def test_cross_entropy_and_batches_without_sampled_tokens_say_nothing(engine: TrainingEngine) -> None:
    assert not KEYS & {*run(engine, MODEL, batch(engine, (5, 3))).metrics}
    zeros = np.zeros(3, np.float32)
    prompt = datum([1, 2, 3], target_tokens=np.array([2, 3, 4]), logprobs=zeros, advantages=zeros)
    assert not KEYS & {*run(engine, MODEL, rl_batch(engine, "ppo", [prompt])).metrics}


@pytest.mark.parametrize("seed", range(5))
def test_any_division_into_micro_batches_gives_the_same_numbers(engine: TrainingEngine, seed: int) -> None:
    data = [rl_datum(length, n, "cispo") for n, length in enumerate((5, 20, 9, 12, 7, 4))]
    whole = rl_batch(engine, "cispo", data)
    one = replace(whole, model_id=MODEL)
    order = [*range(len(data))]
    random.Random(seed).shuffle(order)
    while order:
        count = 1 + seed % 3
        engine.passes.run([(one, order[:count])])
        del order[:count]
    output = engine.passes.finish(one)
    assert isinstance(output, Output)
    assert output.metrics == pytest.approx(run(engine, MODEL, whole).metrics, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 3.0, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_parts_add_up_in_any_order(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    p = rng.normal(-2, 1, 60).astype(np.float32)
    q = (p + rng.normal(0, scale, 60)).astype(np.float32)
    parts = [of(p[n : n + 7], q[n : n + 7]) for n in rng.permutation(range(0, 60, 7))]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total.metrics() == pytest.approx(of(p, q).metrics(), rel=1e-12)
    assert of(p, q).metrics() == pytest.approx(oracle(p, q), rel=1e-9)


def test_policies_that_agree_have_no_mismatch() -> None:
    p = np.linspace(-30, 0, 50, dtype=np.float32)
    assert of(p, p).metrics() == {"sampler_kl:mean": 0.0, "ess:mean": pytest.approx(1.0), "ratio:max": 1.0}


def test_one_token_far_off_shows_in_every_number() -> None:
    p = np.full(100, -1.0, np.float32)
    q = p.copy()
    q[17] = -6.0
    metrics = of(p, q).metrics()
    assert metrics["ratio:max"] == pytest.approx(math.exp(5))
    assert metrics["ess:mean"] < 0.03
    assert metrics["sampler_kl:mean"] == pytest.approx((math.exp(5) - 6) / 100)


@pytest.mark.parametrize("sign", [1, -1])
def test_no_number_overflows(sign: int) -> None:
    q = np.array([-1e30 * sign, -1.0, -2.0], np.float32)
    p = np.array([-1.0, -1.0, -2.0], np.float32)
    total = of(p, q)
    for _ in range(40):
        total = total + total
    assert all(math.isfinite(value) for value in total.metrics().values())
    assert 0 < total.ess <= 1
    away = of(np.full(4, -1000.0), np.zeros(4))  # every ratio is 0 as a number
    assert away.ess == 1.0


def test_chunks_that_the_sdk_has_made_give_sensible_numbers(engine: TrainingEngine) -> None:
    """A mean weighs chunks by their datums: exact for datums of equally many sampled tokens."""
    data = [rl_datum(10, n, "importance_sampling") for n in range(6)]
    whole = run(engine, MODEL, rl_batch(engine, "importance_sampling", data)).metrics
    chunks = [run(engine, MODEL, rl_batch(engine, "importance_sampling", part)) for part in (data[:4], data[4:])]
    merged = combine_fwd_bwd_output_results(
        [
            tinker.ForwardBackwardOutput(
                loss_fn_output_type="x", loss_fn_outputs=[{}] * len(chunk.logprobs), metrics=dict(chunk.metrics)
            )
            for chunk in chunks
        ]
    ).metrics
    assert merged["sampler_kl:mean"] == pytest.approx(whole["sampler_kl:mean"], rel=1e-5)
    assert merged["ratio:max"] == pytest.approx(whole["ratio:max"], rel=1e-5)
    values = [chunk.metrics["ess:mean"] for chunk in chunks]
    assert min(values) <= merged["ess:mean"] <= max(values)


def test_prometheus_has_them_by_loss(base: BaseModel) -> None:
    registry = CollectorRegistry()
    engine = TrainingEngine(base, max_tokens_per_microbatch=30, metrics=Metrics(registry))
    create(engine, MODEL)
    output = run(engine, MODEL, rl_batch(engine, "ppo", [rl_datum(20, 1, "ppo")]))
    run(engine, MODEL, batch(engine, (5,)))
    labels = {"loss_fn": "ppo"}
    keys = {"sampler_kl_nats": "sampler_kl:mean", "ess_ratio": "ess:mean", "max_importance_ratio": "ratio:max"}
    for name, key in keys.items():
        assert registry.get_sample_value(f"trainer_{name}_count", labels) == 1
        assert registry.get_sample_value(f"trainer_{name}_sum", labels) == pytest.approx(output.metrics[key])
    assert registry.get_sample_value("trainer_ess_ratio_count", {"loss_fn": "cross_entropy"}) is None
