"""All parameters of a base model in one flat buffer, which full-parameter training (LoRA rank 0) trains, stores and
sends.

The trainer's buffer is float32. A buffer holds each parameter once, in the order of the model. Matrices of linear
layers lie column by column, because a small decode step on a CPU then takes a third of the time, and a sampler computes
with the received buffer directly. Other parameters lie row by row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import cached_file

from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.modeling.adapter import Adapter, AdapterConfig, LoraWeights
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.config import load_config
from tinsmith.modeling.pretrained import auto_class, load_causal_lm, persistent_buffers

logger = logging.getLogger(__name__)

FULL = AdapterConfig(rank=0)
"""The configuration of every full model."""

_SHARD_SIZE = "5GB"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


class FullWeights:
    """Values for every parameter of `base`, separate from the model's own. `flat` is [numel], of any floating type."""

    config = FULL
    weights: Mapping[str, LoraWeights] = {}
    """The adapters' A and B by layer; empty, because full weights change no layer by an adapter."""

    def __init__(self, base: BaseModel, flat: Tensor) -> None:
        self.base = base
        self.flat = flat

    @property
    def num_bytes(self) -> int:
        return self.flat.nbytes

    @property
    def sent_dtype(self) -> torch.dtype:
        """Type in which the weights are sent, which is the type in which the samplers compute."""
        return self.base.dtype

    def like(self, flat: Tensor) -> FullWeights:
        """This layout over another buffer, such as a gradient or a moment."""
        return FullWeights(self.base, flat)

    def sync(self) -> None:
        """Does nothing, because the values exist in the buffer only. See TrainedWeights.sync."""

    def tensors(self) -> list[Tensor]:
        """Views of the buffer, one for each parameter."""
        specs = self.specs()
        parts = self.flat.split([prod(shape) for _, shape in specs])
        return [
            part.view(shape[::-1]).T if name in self.base.by_columns else part.view(shape)
            for part, (name, shape) in zip(parts, specs, strict=True)
        ]

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Hugging Face name and shape of every parameter, in the order of the buffer."""
        return [(name, tuple(parameter.shape)) for name, parameter in self.base.parameters.items()]

    def save_model(self, folder: Path, *, dtype: torch.dtype) -> None:
        """Writes the files of a Hugging Face model: configuration, safetensors (in shards if large), tokenizer.

        Buffers, which are not parameters, keep the type and the value that the base model gives them.
        """
        path = self.base.path
        config = load_config(path, local_files_only=True)
        with torch.device("meta"):
            skeleton = auto_class(config).from_config(config)
        names = [name for name, _ in self.specs()]
        if names != [name for name, _ in skeleton.named_parameters()]:
            raise Unsupported(f"a model made from the configuration of {path} has other parameters than the loaded one")
        try:
            skeleton.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        except OSError:
            logger.debug("%s has no generation_config.json", path)
        skeleton.to(dtype)  # type: ignore[arg-type]  # transformers' decorated signature
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in zip(names, self.tensors(), strict=True)}
        tensors |= {name: buffer.contiguous() for name, buffer in self.base.buffers.items()}
        skeleton.save_pretrained(folder, state_dict=tensors, max_shard_size=_SHARD_SIZE)
        for name in _TOKENIZER_FILES:
            file = cached_file(path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)  # type: ignore[arg-type]
            if file is not None:
                (folder / name).write_bytes(Path(file).read_bytes())

    @classmethod
    def load_model(cls, folder: Path, base: BaseModel) -> FullWeights:
        """Reads float32 weights into host memory from a folder that save_model wrote.

        Raises InvalidRequest if the folder's model has other parameters than the base model, or other buffers.
        """
        model, missing = load_causal_lm(folder, config=load_config(folder), dtype=torch.float32)
        found = dict(model.named_parameters())
        weights = cls(base, torch.empty(sum(parameter.numel() for parameter in base.parameters.values())))
        shapes = {name: tuple(parameter.shape) for name, parameter in found.items()}
        if odd := sorted(set(shapes.items()) ^ set(weights.specs())) or missing:
            raise InvalidRequest(f"checkpoint tensors do not fit this base model: {odd[0]!r} is on one side only")
        for name, buffer in persistent_buffers(model).items():
            ours = base.buffers[name].cpu()
            if not torch.equal(buffer.to(ours.dtype), ours):
                raise InvalidRequest(f"checkpoint tensors do not fit this base model: {name!r} has other values there")
        with torch.no_grad():
            for tensor, (name, _) in zip(weights.tensors(), weights.specs(), strict=True):
                tensor.copy_(found[name])
        return weights


class TrainedWeights(FullWeights):
    """The parameters of `base` itself, with a float32 buffer that training changes.

    If the model computes in float32, its parameters are views of the buffer. Otherwise the buffer is the master copy,
    and sync() rounds it into the parameters.
    """

    @classmethod
    def take(cls, base: BaseModel) -> TrainedWeights:
        """Takes over the parameters with their present values. Raises Unsupported if they have several types."""
        odd = [name for name, parameter in base.parameters.items() if parameter.dtype != base.dtype]
        if odd:
            raise Unsupported(
                f"lora_config.rank: 0 is not possible for this base model: its parameter {odd[0]!r} is "
                f"{base.parameters[odd[0]].dtype}, not {base.dtype} as its output layer"
            )
        numel = sum(parameter.numel() for parameter in base.parameters.values())
        weights = cls(base, torch.empty(numel, device=base.device))
        with torch.no_grad():
            for view, parameter in zip(FullWeights.tensors(weights), base.parameters.values(), strict=True):
                view.copy_(parameter)
                if parameter.dtype == view.dtype:
                    parameter.data = view
        return weights

    def tensors(self) -> list[Tensor]:
        """The model's parameters, with respect to which gradients are taken."""
        return list(self.base.parameters.values())

    @torch.no_grad()
    def sync(self) -> None:
        """Copies the buffer into the parameters. To be called after each change of the buffer."""
        if self.base.dtype != self.flat.dtype:
            torch._foreach_copy_(self.tensors(), FullWeights.tensors(self))


class ParameterSwitch:
    """Switches a base model's parameters between their own values and those of a full version."""

    def __init__(self, base: BaseModel) -> None:
        self._parameters = list(base.parameters.values())
        self._own = [parameter.data for parameter in self._parameters]
        self._current: FullWeights | None = None

    def use(self, weights: FullWeights | None) -> None:
        """Points the parameters at a version, or at their own values for None. Copies nothing."""
        if weights is self._current:
            return
        values = self._own if weights is None else weights.tensors()
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
        self._current = weights

    def forget(self, weights: object) -> None:
        """Drops the reference to an unloaded version. The parameters get their own values if the version was in use."""
        if weights is self._current:
            self.use(None)


Weights = Adapter | FullWeights
"""The weights that one model trains, or that one version serves."""


@torch.no_grad()
def reload(base: BaseModel) -> None:
    """Restores the parameters from the model's files. Raises OSError if the files no longer exist."""
    config = load_config(base.path, local_files_only=True)
    model = auto_class(config).from_pretrained(base.path, config=config, dtype=base.dtype, local_files_only=True)
    stored = dict(model.named_parameters())
    for name, parameter in base.parameters.items():
        parameter.copy_(stored[name])
