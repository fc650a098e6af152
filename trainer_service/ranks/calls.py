"""The engine's calls that every rank makes in the same way, in one table for rank 0 and the others, and their arguments
as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor

from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights, Weights
from tinsmith.sizing import Footprint
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import Accumulation, CapturedState, OptimizerState, TrainingEngine
from trainer_service.engine.model_state import ModelState
from trainer_service.engine.optimizers import AdamParams, DimuonParams
from trainer_service.ranks.wire import Message

CALLS: Mapping[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        TrainingEngine.follow,
        TrainingEngine.add_model,
        TrainingEngine.create_model,
        TrainingEngine.delete_model,
        TrainingEngine.probe,
        TrainingEngine.taint,
        TrainingEngine.optim_step,
        TrainingEngine.gather_gradient,
        TrainingEngine.restore,
        TrainingEngine.score_together,
    )
}
_RECORDS: Mapping[str, type[Any]] = {
    cls.__name__: cls
    for cls in (Plan, Footprint, AdapterConfig, AdamParams, DimuonParams, CapturedState, OptimizerState, Accumulation)
}
"""Classes whose objects are sent field by field."""


def message_of(call: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]) -> Message:
    """The message of a call in CALLS."""
    assert call is CALLS[call.__name__]
    tensors: list[Tensor] = []
    return Message(call.__name__, {"packed": _packed([list(arguments), dict(named)], tensors)}, tensors)


def make(message: Message, engine: TrainingEngine) -> None:
    """Makes the call of a message on this rank's engine."""
    arguments, named = _unpacked(message.fields["packed"], message.tensors, engine.base)
    CALLS[message.name](engine, *arguments, **named)


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    """The value as JSON. Its tensors are appended to `tensors`."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            tensors.append(value.detach().cpu())
            return {"tensor": len(tensors) - 1}
        case np.ndarray() if value.dtype == np.int32:  # the only dtype that comes back
            return {"array": value.tolist()}
        case list() | tuple():
            return [_packed(one, tensors) for one in value]
        case dict():
            return {"dict": {key: _packed(one, tensors) for key, one in value.items()}}
        case ModelState():
            return {"model": _packed([value.adapter, value.optimizer_kind], tensors)}
        case Adapter() | FullWeights():
            return {"weights": _packed([value.config, value.flat], tensors)}
        case _:
            name = type(value).__name__
            return {name: {one.name: _packed(getattr(value, one.name), tensors) for one in fields(_RECORDS[name])}}


def _unpacked(value: Any, tensors: Sequence[Tensor], base: BaseModel) -> Any:
    """The value that `_packed` has packed. Its arrays are int32, and its tensors lie in host memory; only those of a
    ModelState are on the base model's device."""
    if isinstance(value, list):
        return [_unpacked(one, tensors, base) for one in value]
    if not isinstance(value, dict):
        return value
    ((what, content),) = value.items()
    match what:
        case "tensor":
            return tensors[content]
        case "array":
            return np.array(content, np.int32)
        case "dict":
            return {key: _unpacked(one, tensors, base) for key, one in content.items()}
        case "model":
            weights, optimizer = _unpacked(content, tensors, base)
            return ModelState(weights.like(weights.flat.to(base.device)), optimizer)
        case "weights":
            return _weights(base, *_unpacked(content, tensors, base))
        case _:
            return _RECORDS[what](**{key: _unpacked(one, tensors, base) for key, one in content.items()})


def _weights(base: BaseModel, config: AdapterConfig, flat: Tensor) -> Weights:
    return FullWeights(base, flat) if config.rank == 0 else Adapter(config, base.targets, flat)
