"""Divides a base model among the ranks of one trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from tinsmith.modeling.adaptation import decoder_layers, decoder_of
from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.parallel_base import ShardedLayers, parameters_outside
from tinsmith.modeling.parallel_ops import Peers
from tinsmith.modeling.parallel_tensor import CannotDivide, TensorParallel, divided_axes
from tinsmith.modeling.weight_parts import WeightParts

T = TypeVar("T")


class InTurns(Protocol):
    """A function that lets the ranks of a machine do something one after the other."""

    def __call__(self, call: Callable[[], T], /) -> T:
        """Makes the call on the ranks of a machine one after the other."""
        ...


@dataclass(frozen=True, slots=True)
class Division:
    """The ranks among which a model is divided."""

    tensor: Peers | None
    """Ranks that divide the features of each layer; None if they are not divided."""
    mesh: DeviceMesh | None
    """Ranks, in one dimension, that divide the memory of each layer; None if it is not divided."""
    in_turns: InTurns
    """Reads the model on one rank after the other, so that a machine's memory holds at most one whole model."""

    @property
    def parts(self) -> WeightParts:
        return WeightParts(self.tensor, self.mesh)

    def cut(self, model: PreTrainedModel, device: torch.device) -> None:
        """Prepares a model whose weights have not been read yet, so that only this rank's part of them is read. Changes
        nothing if the model's files do not allow that. Raises CannotDivide."""
        axes = {} if self.tensor is None else divided_axes(model, self.tensor.size)
        layers = decoder_layers(decoder_of(model), model.config.get_text_config().num_hidden_layers)
        with torch.device("cpu"):  # transformers makes the model on the meta device
            self.parts.cut(model, axes, layers, device)

    def apply(
        self, model: PreTrainedModel, layers: Sequence[nn.Module], active: ActiveRuns, device: torch.device
    ) -> tuple[TensorParallel | None, ShardedLayers | None]:
        """Divides a model whose layers are adapted, and moves this rank's part to `device`. Raises CannotDivide."""
        tensor = None
        if self.tensor is not None:
            by_columns = device.type == "cpu" and self.mesh is None  # FSDP2 does not take weights column by column
            tensor = TensorParallel.divide(model, active, self.tensor, by_columns=by_columns)
        if self.mesh is None:
            model.to(device)  # type: ignore[arg-type]  # transformers' decorated signature
            return tensor, None
        if not layers:
            raise CannotDivide(
                f"shard_base: {type(model).__name__} has no list of {model.config.get_text_config().num_hidden_layers} "
                "layers to divide; set it to false"
            )
        for parameter in parameters_outside(model, layers):
            parameter.data = parameter.data.to(device)
        for name, buffer in list(model.named_buffers()):
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, buffer.to(device))
        return tensor, ShardedLayers(decoder_of(model), layers, self.mesh)
