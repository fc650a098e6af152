"""The live models in memory, by id, and the base model's names and weights, by which requests are checked."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinsmith.errors import InvalidRequest, ModelNotFound
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.quantization import described
from tinsmith.rpc.paths import creation_of, version_of
from tinsmith.rpc.times import timestamp
from tinsmith.rpc.words import value_of, word_of
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.engine.engine import CapturedState

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Model:
    """The facts about a live model that the engine does not hold."""

    model_id: str
    base_model: str
    base_weights: str
    """Checksum of the base weights that the model adapts; empty for a model with all parameters of its own."""
    config: AdapterConfig
    optimizer: str
    user_metadata: Mapping[str, str]
    creation_id: str
    """Distinguishes the model from earlier ones of the same id; empty when an earlier version of Tinsmith made it."""
    step: int = 0
    """Number of optimizer steps applied."""

    @property
    def optimizer_kind(self) -> types_pb2.Optimizer:
        return value_of(types_pb2.Optimizer, self.optimizer)

    def version(self, seq_id: int, *, save_id: str = "") -> str:
        """Id of the model's version after the operation `seq_id`, which was made by the save with this id, if any."""
        return version_of(self.model_id, seq_id, self.creation_id, save_id)

    def to_proto(self, *, next_seq_id: int) -> pb.ModelInfo:
        return pb.ModelInfo(
            model_id=self.model_id,
            base_model=self.base_model,
            lora_config=config_to_proto(self.config),
            optimizer=self.optimizer_kind,
            step=self.step,
            next_seq_id=next_seq_id,
            user_metadata=self.user_metadata,
        )

    def snapshot_info(self, seq_id: int, state: CapturedState) -> types_pb2.CheckpointInfo:
        """The facts for a snapshot of the state after the operation `seq_id`."""
        return types_pb2.CheckpointInfo(
            location=f"{self.model_id}/{seq_id}",
            kind=types_pb2.CHECKPOINT_KIND_TRAINING,
            model_id=self.model_id,
            base_model=self.base_model,
            base_weights=self.base_weights,
            lora_config=config_to_proto(state.config),
            version_id=self.version(seq_id),
            step=state.step,
            has_optimizer=state.optimizer is not None,
            optimizer=self.optimizer_kind,
            user_metadata=self.user_metadata,
            created_at=timestamp(time.time()),
        )

    @classmethod
    def of_snapshot(cls, info: types_pb2.CheckpointInfo, state: CapturedState, *, base_weights: str) -> Model:
        """The model that a snapshot describes. `base_weights`: checksum of this trainer's base weights."""
        metadata, creation_id = dict(info.user_metadata), creation_of(info.version_id)
        optimizer = word_of(types_pb2.Optimizer, info.optimizer)
        return cls(
            info.model_id, info.base_model, base_weights, state.config, optimizer, metadata, creation_id, info.step
        )


def _difference(theirs: str, ours: str) -> str:
    """The reason for which two checksums of base weights differ."""
    (their_sum, _, their_form), (our_sum, _, our_form) = theirs.partition("-"), ours.partition("-")
    if their_sum != our_sum:
        return "another set of weights has the same name"
    return (
        f"they are the same weights, then {described(their_form)} and now {described(our_form)} (`tinsmith up "
        "--quantize`, TRAINER_QUANTIZE and SAMPLER_QUANTIZE)"
    )


class LiveModels:
    """The live models in memory, by model_id. All train this trainer's base model."""

    def __init__(self, base_models: Sequence[str], base_weights: str, *, allow_other_weights: bool = False) -> None:
        """`allow_other_weights`: models trained on other base weights of the same name are accepted, with a warning."""
        self.base_models = base_models
        """Public names of the base model."""
        self.base_weights = base_weights
        """Checksum of the base model's weights (modeling/base_weights.py)."""
        self._allow_other_weights = allow_other_weights
        self._models: dict[str, Model] = {}

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._models

    def get(self, model_id: str) -> Model:
        """Raises ModelNotFound when no model of this id is in memory."""
        if model_id not in self._models:
            raise ModelNotFound(f"model_id: there is no model {model_id!r}", model_id=model_id)
        return self._models[model_id]

    def add(self, model: Model) -> None:
        self._models[model.model_id] = model

    def drop(self, model_id: str) -> None:
        """Removes a model, if it is there."""
        self._models.pop(model_id, None)

    def check_base_model(self, base_model: str, *, field: str) -> None:
        """Raises InvalidRequest unless `base_model` is one of this trainer's names."""
        if base_model not in self.base_models:
            raise InvalidRequest(
                f"{field}: {base_model!r} is not served by this trainer; it serves {', '.join(self.base_models)}",
                field=field,
            )

    def weights_of(self, config: AdapterConfig) -> str:
        """`Model.base_weights` for a model of this configuration."""
        return self.base_weights if config.rank else ""

    def check_base_weights(self, base_weights: str, *, field: str) -> None:
        """Raises InvalidRequest for the checksum of other base weights. An empty one, from before there were checksums,
        is accepted."""
        if base_weights in ("", self.base_weights):
            return
        message = (
            f"{field}: {base_weights!r} is the checksum of the base weights that it was trained on, but this "
            f"trainer's {self.base_models[0]} has {self.base_weights!r}: {_difference(base_weights, self.base_weights)}"
        )
        if not self._allow_other_weights:
            raise InvalidRequest(
                f"{message}. Serve those that it was trained on, or set TRAINER_ALLOW_OTHER_BASE_WEIGHTS=true",
                field=field,
            )
        logger.warning("%s; the model is used nevertheless (allow_other_base_weights)", message)
