"""Counts the layers of a model for which families.py has no formula. transformers makes the model from config.json, on
torch's meta device, where weights take no memory. This takes some seconds, and needs torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from tinsmith_cli.planning.shape import Matrix

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from tinsmith.modeling.adapter import Target

_SOUND = "audio"
"""Text in the names of the modules for sound, which take no adapters."""
_SHOWN = 150
"""Most characters of an error that are shown."""


class NotCounted(Exception):
    """The model cannot be made here. The message says why."""


@dataclass(frozen=True, slots=True)
class CountedLayer:
    """Counted sizes of a decoder layer."""

    matrices: Mapping[str, Matrix]
    """The linear layers that take adapters, by their names in the layer."""
    others: int
    """Parameters outside of the matrices."""


@dataclass(frozen=True, slots=True)
class CountedModel:
    """Counted sizes of a model."""

    config: Mapping[str, Any]
    """Configuration of the language model, with the settings that config.json leaves to transformers."""
    parameters: int
    tied: bool
    """Whether the output layer shares the embedding's weight."""
    layers: Sequence[CountedLayer]
    """The decoder layers; none if they form no list."""
    tower: Sequence[Matrix]
    """The linear layers for pictures, including layers on which no feature depends; empty if the model takes no
    pictures here."""
    tower_parameters: int
    """All parameters beside the language model: those of the towers for pictures and sound, and of the layers between
    towers and language model."""


def count(config: Mapping[str, Any]) -> CountedModel:
    """Counts the model of a config.json, as the services load it. Raises NotCounted."""
    try:
        import torch
        from transformers import CONFIG_MAPPING

        from tinsmith.modeling.pretrained import auto_class
    except ModuleNotFoundError as error:
        raise NotCounted(f"{error.name} is not installed here") from None
    name = str(config.get("model_type"))
    if name not in CONFIG_MAPPING:
        raise NotCounted(f"transformers does not know models of type {name!r}")
    quantised = "quantization_config"  # with it, the number of weights would differ
    settings = {key: _without(value, quantised) for key, value in config.items() if key != quantised}
    try:
        made = CONFIG_MAPPING[name].from_dict(settings)
        kind = auto_class(made)
        if kind is None:
            raise NotCounted(f"transformers has no causal language model for {type(made).__name__}")
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(made, dtype=torch.bfloat16)
        return _counted(model)
    except NotCounted:
        raise
    except Exception as error:  # models raise errors of all kinds
        raise NotCounted(f"transformers cannot make a model of it: {shorten(str(error), _SHOWN)}") from None


def _without(value: Any, name: str) -> Any:
    return {key: one for key, one in value.items() if key != name} if isinstance(value, dict) else value


def _counted(model: PreTrainedModel) -> CountedModel:
    from torch import nn

    from tinsmith.modeling.adaptation import adapt, decoder_layers, decoder_of
    from tinsmith.modeling.adapter_runs import ActiveRuns
    from tinsmith.modeling.pretrained import beside_text
    from tinsmith.pictures.families import FAMILIES

    text = model.config.get_text_config()
    beside = beside_text(model)
    for_pictures = [part for name, part in beside if _SOUND not in name] if model.config.model_type in FAMILIES else []
    tower = [
        Matrix(one.in_features, one.out_features, "vision", bias=one.bias is not None)
        for part in for_pictures
        for one in part.modules()
        if type(one) is nn.Linear
    ]
    layers = decoder_layers(decoder_of(model), text.num_hidden_layers)
    names = {module: name for name, module in model.named_modules()}
    sizes = [(f"{names[layer]}.", _size(layer)) for layer in layers]
    output = model.get_output_embeddings()
    parameters, tied = _size(model), output is not None and output.weight is model.get_input_embeddings().weight
    targets, _ = adapt(model, ActiveRuns(), replace=True)  # changes the model
    return CountedModel(
        config=text.to_dict(),
        parameters=parameters,
        tied=tied,
        layers=[_layer(prefix, size, targets) for prefix, size in sizes],
        tower=tower,
        tower_parameters=sum(_size(part) for _, part in beside),
    )


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _layer(prefix: str, size: int, targets: Sequence[Target]) -> CountedLayer:
    matrices = {
        one.name.removeprefix(prefix): Matrix(
            one.in_features, one.out_features, one.group, num_experts=one.num_experts or 0, shares=one.shared
        )
        for one in targets
        if one.name.startswith(prefix)
    }
    return CountedLayer(matrices, size - sum(one.parameters for one in matrices.values()))
