"""The trainer's scores of the canary: those of its training pass, whatever weights, and without a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.batches import datum, request
from tests.support.models import CONTEXT, VOCAB_SIZE
from tests.unit.trainer_service.engines import create, run
from tinsmith.modeling.adapter import Adapter, AdapterConfig, LoraWeights
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FULL, FullWeights
from trainer_service.engine.engine import TrainingEngine
from trainer_service.requests import batch_of
from trainer_service.weight_sync.canary import Tokens, _in_place, canary, canary_of, score
from trainer_service.weight_sync.certificate import GAP_LIMITS

SEQUENCES = canary(4, vocab_size=VOCAB_SIZE, max_context_length=CONTEXT)


def trained(engine: TrainingEngine, model_id: str, sequences: Sequence[Tokens]) -> np.ndarray:
    """By a forward_backward of the same sequences."""
    data = [
        datum(one.tolist(), target_tokens=np.roll(one, -1).astype(np.int64), weights=np.ones(one.size, np.float32))
        for one in sequences
    ]
    output = run(engine, model_id, batch_of(request(data), engine.limits))
    return np.concatenate([logprobs[:-1] for logprobs in output.logprobs])


def full_engine(model_folder: Path) -> TrainingEngine:
    base = BaseModel.load(model_folder, device=torch.device("cpu"), dtype=torch.float32, trainable=True)
    engine = TrainingEngine(base, max_tokens_per_microbatch=100)
    engine.create_model("full", FULL, "adamw")
    return engine


@pytest.mark.parametrize("vocab_size", [2, 17, 512, 151_936])
@pytest.mark.parametrize("context", [3, 16, 4096])
def test_the_canary_is_fixed_and_fits_every_model(vocab_size: int, context: int) -> None:
    sequences = canary(4, vocab_size=vocab_size, max_context_length=context)
    tokens = np.concatenate(sequences)
    assert 0 <= tokens.min() <= tokens.max() < vocab_size
    assert all(2 <= one.size < context for one in sequences), "one more token is drawn"
    again = canary(4, vocab_size=vocab_size, max_context_length=context)
    assert all(np.array_equal(one, other) for one, other in zip(sequences, again, strict=True))


def test_scores_are_those_of_the_training_pass(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=100)
    create(engine, "m")
    expected = trained(engine, "m", SEQUENCES)
    assert expected.size == 60
    copied = engine.capture("m", with_optimizer=False).adapter
    for weights in (engine.weights("m"), copied):
        np.testing.assert_array_equal(engine.score(weights, SEQUENCES), expected)
    with torch.no_grad():
        engine.weights("m").flat.zero_()
    assert np.abs(engine.score(engine.weights("m"), SEQUENCES) - expected).max() > 0.01
    np.testing.assert_array_equal(engine.score(copied, SEQUENCES), expected)


def missing(weights: LoraWeights) -> None:
    weights.b_O_R.zero_()


def in_another_order(weights: LoraWeights) -> None:
    weights.b_O_R.copy_(weights.b_O_R.roll(1, dims=0))


def half_as_strong(weights: LoraWeights) -> None:
    """As with a scaling of alpha over twice the rank."""
    weights.b_O_R.mul_(0.5)


@pytest.mark.parametrize("corrupt", [missing, in_another_order, half_as_strong])
def test_one_wrong_projection_of_one_layer_is_above_the_limit(
    base: BaseModel, corrupt: Callable[[LoraWeights], None]
) -> None:
    """Tries every kind of projection in every layer, with the one sequence that a CPU scores."""
    sequences = canary_of(base)
    adapter = Adapter.create(AdapterConfig(rank=8, seed=3), base.targets, base.device)
    generator = torch.Generator().manual_seed(0)
    for weights in adapter.weights.values():
        weights.b_O_R.normal_(0, 0.05, generator=generator)
    sound = score(base, adapter, sequences)
    gaps = {}
    for name in adapter.weights:
        wrong = adapter.like(adapter.flat.clone())
        corrupt(wrong.weights[name])
        gaps[name] = np.abs(score(base, wrong, sequences) - sound).max()
    kinds = {name.rpartition(".")[2] for name in gaps}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert min(gaps.values()) > GAP_LIMITS[torch.float32], gaps


def test_a_stored_version_of_all_parameters_is_scored_beside_the_live_one(model_folder: Path) -> None:
    engine = full_engine(model_folder)
    before = trained(engine, "full", SEQUENCES)
    stored = engine.capture("full", with_optimizer=False).adapter
    with torch.no_grad():
        engine.weights("full").flat.mul_(1.5)
    live = trained(engine, "full", SEQUENCES)
    assert np.abs(live - before).max() > 0.1
    np.testing.assert_array_equal(engine.score(stored, SEQUENCES), before)
    np.testing.assert_array_equal(engine.score(engine.weights("full"), SEQUENCES), live)
    np.testing.assert_array_equal(trained(engine, "full", SEQUENCES), live)


def test_parameters_come_back_also_after_an_error(model_folder: Path) -> None:
    base = full_engine(model_folder).base
    own = {name: parameter.detach().clone() for name, parameter in base.parameters.items()}
    zeros = FullWeights(base, torch.zeros(sum(tensor.numel() for tensor in own.values())))

    def fail(*_: object) -> None:
        assert not any(parameter.any() for parameter in base.parameters.values())
        raise RuntimeError("told to")

    hook = base.decoder.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="told to"):
        TrainingEngine(base, max_tokens_per_microbatch=100).score(zeros, SEQUENCES)
    hook.remove()
    with pytest.raises(RuntimeError, match="told to"), _in_place([*base.parameters.values()], zeros.tensors()):
        fail()
    for name, parameter in base.parameters.items():
        assert torch.equal(parameter, own[name]), name
        assert parameter.requires_grad
