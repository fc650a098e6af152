"""Optimizer settings: JSON to the trainer's messages, or a refusal that names the field."""

from typing import Any

import pytest
from pydantic import ValidationError

from gateway import convert, schemas
from gateway.codec import invalid
from gateway.schema_types import TinkerBody
from tinsmith.errors import InvalidRequest
from tinsmith.v1 import trainer_pb2

IDS = {"model_id": "s:train:0", "seq_id": 1}
DIMUON = {"type": "dimuon", "learning_rate": 0.5}


def parsed(schema: type[TinkerBody], body: dict[str, Any]) -> Any:
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise invalid(error, body) from None


def step(**params: Any) -> trainer_pb2.OptimStepRequest:
    return convert.optim_step(parsed(schemas.OptimStep, {**IDS, **params}))


def test_dimuon_parameters_become_the_trainers() -> None:
    full = step(optimizer_params={**DIMUON, "beta1": 0.5, "grad_clip_norm": -1.0}).dimuon_params
    assert (full.learning_rate, full.beta1, full.grad_clip_norm) == (0.5, 0.5, -1.0)
    plain = step(optimizer_params=DIMUON).dimuon_params
    assert (plain.learning_rate, plain.beta1, plain.grad_clip_norm) == (0.5, 0.9, 0.0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "adam_params: is missing"),
        ({"adam_params": {}, "optimizer_params": DIMUON}, "optimizer_params: was sent together with adam_params"),
        (
            {"optimizer_params": {"type": "muon", "learning_rate": 1.0}},
            r"optimizer_params\.type: .*'dimuon', not 'muon'",
        ),
        ({"optimizer_params": {"learning_rate": 1.0}}, r"optimizer_params\.type: Field required"),
        ({"optimizer_params": {"type": "dimuon"}}, r"optimizer_params\.learning_rate: Field required"),
        ({"optimizer_params": {**DIMUON, "eps": 1e-8}}, r"optimizer_params\.eps: this server knows no such field"),
        ({"optimizer_params": {**DIMUON, "version": 1}}, r"optimizer_params\.version: this server knows no such field"),
        ({"optimizer_params": {**DIMUON, "beta1": "high"}}, r"optimizer_params\.beta1: .*not 'high'"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        step(**params)


def test_optimizer_configs_are_those_of_the_sdk() -> None:
    for config in ({}, {"type": "adamw"}, {"type": "dimuon"}, {"type": "dimuon", "version": 1}):
        assert parsed(schemas.OptimizerConfig, config).type == config.get("type", "adamw")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "dimuon", "version": 2}, "version: .*not 2"),
        ({"type": "adamw", "version": 1}, "version: only dimuon has one; 'adamw' has none"),
        (
            {"type": "dimuon", "version": 1, "nesterov": True},
            "nesterov: this server knows no such field and",
        ),
    ],
)
def test_a_wrong_optimizer_config_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parsed(schemas.OptimizerConfig, config)
