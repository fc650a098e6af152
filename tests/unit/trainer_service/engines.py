"""Engines with a model or two, for tests of what happens around the mathematics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.batches import random_datum, request
from tests.support.models import VOCAB_SIZE
from tinsmith.modeling.adapter import AdapterConfig
from trainer_service.engine.batch import Batch, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.optimizers import AdamParams
from trainer_service.requests import batch_of

ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.0)


def create(engine: TrainingEngine, model_id: str, *, rank: int = 4) -> None:
    """A model whose B is not zero, so that every gradient lives."""
    engine.create_model(model_id, AdapterConfig(rank=rank, seed=1), "adamw")
    torch.manual_seed(2)
    with torch.no_grad():
        for weights in engine.models[model_id].adapter.weights.values():
            weights.b_O_R.normal_(0, 0.05)


def batch(
    engine: TrainingEngine, lengths: Sequence[int], *, forward_only: bool = False, vocab_size: int = VOCAB_SIZE
) -> Batch:
    data = [random_datum(length, seed, vocab_size=vocab_size) for seed, length in enumerate(lengths)]
    return batch_of(request(data, forward_only=forward_only), engine.limits)


def run(engine: TrainingEngine, model_id: str, one: Batch) -> Output:
    (output,) = engine.forward_backward([(model_id, one)])
    assert isinstance(output, Output), output
    return output


def gradient(engine: TrainingEngine, model_id: str) -> torch.Tensor:
    return engine.models[model_id].need_gradient().flat.clone()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert (ours - theirs).norm() <= tolerance * theirs.norm()
