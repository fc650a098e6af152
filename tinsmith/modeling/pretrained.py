"""Loads causal language models with transformers, and reports parameters that are missing from their files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _get_model_class

from tinsmith.modeling.quantized import LoadingConfig, quantized_in_files
from tinsmith.pictures.families import FAMILIES

logger = logging.getLogger(__name__)

_SHOWN = 4


class UnsupportedModel(Exception):
    """The base model cannot be run here. The message says why."""


def _damaged_file(path: str | Path) -> str:
    """Name of the first file of weights in the folder `path` that cannot be read."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return file.name
    return "a file of weights"


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that makes a causal language model with this configuration; None if there is none.

    A model that also sees pictures counts as a causal language model. For some such models transformers can load the
    language model alone. Models of the families that see pictures here are always loaded as a whole, because their
    files and adapters name the layers as in the whole model."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in FAMILIES:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else None


def load_causal_lm(
    path: str | Path,
    *,
    config: PretrainedConfig,
    dtype: torch.dtype,
    quantization: LoadingConfig | None = None,
    tower: bool = True,
    cut: Callable[[PreTrainedModel], None] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the parameters that its files lack, which transformers fills at random. The model is
    in host memory unless it is quantised or `cut` is given.

    `quantization`: quantises weights while they are read (quantized.py); None does not. `tower`: False leaves out the
    layers for pictures, and does not read their weights. `cut`: called with the model before its weights are read; it
    may make places for only a part of them (weight_parts.py).

    A tied parameter does not count as missing if the files hold its partner. Nor does a parameter that transformers
    expects to be absent. Raises OSError if there is no such model, if a file of its weights is damaged, or if the shape
    of a tensor differs from the configuration. Raises ValueError for weights that cannot be quantised. Code that comes
    with a model is never run.
    """
    if quantization is not None:
        if method := quantized_in_files(config):
            raise ValueError(
                f"quantize: the files of this model are quantised already ({method}), and would lose precision twice; "
                "leave it out, or fetch the model in bfloat16"
            )
        options["quantization_config"] = quantization
    kind, config = _class_and_config(config, tower=tower, cut=cut)
    try:
        # transformers reports the names of mismatched tensors only if it is told to ignore them.
        loaded: Any = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    except SafetensorError as error:
        raise OSError(f"{_damaged_file(path)} is damaged ({error}); fetch it again") from error
    model, report = loaded
    mismatched = sorted(report["mismatched_keys"])
    if quantization is not None:
        model.hf_quantizer.remove_quantization_config(model)
        mismatched += quantization.mismatched(model)
    _check_shapes(mismatched)
    if unexpected := report["unexpected_keys"]:
        logger.info("%s: the model has no use for %s", path, listed(sorted(unexpected)))
    return model, sorted(report["missing_keys"])


def _class_and_config(
    config: PretrainedConfig, *, tower: bool, cut: Callable[[PreTrainedModel], None] | None
) -> tuple[Any, PretrainedConfig]:
    """The class of transformers that loads the model, and the configuration that it takes. `tower`, `cut`: see
    `load_causal_lm`."""
    kind: Any = auto_class(config)
    if not tower and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind is AutoModelForImageTextToText:
        whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        kind = _changed(whole, _drop_tower)
    if cut is None:
        return kind, config
    if kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        kind = _get_model_class(config, kind._model_mapping)
        if kind.config_class == config.sub_configs.get("text_config"):  # as the automatic class does
            config = config.get_text_config()
    return _changed(kind, cut), config


def _check_shapes(mismatched: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Raises OSError if there are mismatched tensors. `mismatched`: name, shape in the files and shape by the
    configuration of each of them."""
    if not mismatched:
        return
    (name, stored, expected), *rest = mismatched
    more = f", and {len(rest)} more do not fit" if rest else ""
    raise OSError(
        f"{name} is {list(stored)} in the weights and {list(expected)} by config.json{more}: they are not of one "
        "model; fetch both again"
    )


def beside_text(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The parts of a model beside its language model, which are for pictures and sound, with their names in
    `base_model`. Empty for a model of text."""
    inner: Any = model.base_model
    language = getattr(inner, "language_model", None)
    return [] if language is None else [(name, part) for name, part in inner.named_children() if part is not language]


def _drop_tower(model: PreTrainedModel) -> None:
    """Removes everything but the language model and the output layer."""
    for name, _ in beside_text(model):
        delattr(model.base_model, name)


def _changed(kind: type[PreTrainedModel], change: Callable[[PreTrainedModel], None]) -> Any:
    """A subclass of `kind` whose models are changed by `change` as soon as they are made. At that time a model has no
    memory yet. transformers then reads only the weights that the changed model has places for."""

    def init(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        change(self)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that a model's files hold besides the parameters, by Hugging Face name."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return {name: buffer for name, buffer in model.named_buffers() if name not in computed}


def listed(names: Sequence[str]) -> str:
    """The first few names, as text."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
