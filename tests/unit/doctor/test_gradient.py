"""The gradient that the doctor reads from an optimizer step."""

import torch

from tests.unit.trainer_service.engines import create
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.base_model import BaseModel
from tinsmith_cli.doctor.trainer import _gradient
from trainer_service.engine.engine import TrainingEngine


def test_large_gradients_are_read_as_exactly_as_small_ones(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=100)
    create(engine, "m")
    gradient = engine.models["m"].need_gradient().flat
    sizes = torch.tensor([0.0, 0.1, -3.0, 500.0, -2000.0])
    gradient.copy_(sizes[torch.arange(len(gradient)) % len(sizes)])
    expected = gradient.clone()
    before = engine.capture("m", with_optimizer=False).adapter
    assert isinstance(before, Adapter)
    torch.testing.assert_close(_gradient(engine, "m", before), expected, rtol=1e-5, atol=1e-6)
