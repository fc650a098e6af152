"""An adapter's tensors, which are views of one flat buffer, and the PEFT files that hold them.

With one buffer an optimizer step takes a few operations, a snapshot is one copy, and a publish is one broadcast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from tinsmith.errors import InvalidRequest, Unsupported

ALPHA = 32
"""lora_alpha of every adapter, independent of its rank, so that one learning rate suits all ranks."""

GROUPS = ("attn", "mlp", "unembed")
"""Groups of layers of the language model."""
VISION = "vision"
"""Group of the linear layers for pictures: those of the vision tower, and those between it and the language model."""
ALL_GROUPS = (*GROUPS, VISION)
Group = Literal["attn", "mlp", "unembed", "vision"]

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings in Tinker's lora_config. Rank 0 stands for full-parameter training (full_weights.py)."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int | None = None
    train_vision: bool = False

    @property
    def groups(self) -> set[Group]:
        chosen: dict[Group, bool] = {
            "attn": self.train_attn,
            "mlp": self.train_mlp,
            "unembed": self.train_unembed,
            "vision": self.train_vision,
        }
        return {group for group, wanted in chosen.items() if wanted}

    @property
    def scaling(self) -> float:
        return ALPHA / self.rank


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer, or the same layer of all experts in one tensor, that adapters may change."""

    name: str
    """Path of the module in the Hugging Face model, or of the parameter that holds all experts."""
    group: Group
    in_features: int
    out_features: int
    num_experts: int | None = None
    shared: Literal["A", "B"] | None = None
    """Which of A and B all experts share; None for a linear layer. The other one has the experts as its first
    dimension."""
    peft_name: str | None = None
    """Name of the module in the names of PEFT's tensors, if it is not `name`."""
    ambiguous: bool = False
    """Whether a layer of another group, or of none, has the same last part of its name."""
    tinker_name: str | None = None
    """Name of the module in the hosted service's files, if it is not `name`. It differs for an output layer that shares
    the embedding's weight, for the layers of a language model beside a vision tower, and for fused experts, which have
    the name of their first projection. Tools that merge such files look for this name."""
    projections: Sequence[str] = ()
    """Names of the experts' projections in the hosted service's files. There are two, gate and input ("w1", "w3"), if
    this layer's outputs hold both."""
    interleaved: bool = False
    """Whether the outputs of two projections alternate. Otherwise the first half belongs to the first projection."""
    fan_in_fan_out: bool = False
    """Whether the layer's own weight is W transposed, as in GPT-2 (PEFT's name). A and B are not transposed."""

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B."""
        a, b = (rank, self.in_features), (self.out_features, rank)
        if self.num_experts is None:
            return a, b
        return (a, (self.num_experts, *b)) if self.shared == "A" else ((self.num_experts, *a), b)

    def with_tinker_name(self) -> Target:
        """This target under its name in the hosted service's files. Its tensors then have the form of these files,
        too."""
        return self if self.tinker_name is None else replace(self, name=self.tinker_name, peft_name=None)

    def named_as_in(self, names: Collection[str]) -> Target:
        """This target under the name that a file with tensors of these names uses."""
        hosted = self.with_tinker_name()
        return hosted if any(name in names for name in hosted.peft_names) else self

    @property
    def _has_hosted_experts(self) -> bool:
        return self.num_experts is not None and self.name == self.tinker_name

    @property
    def peft_modules(self) -> Sequence[str]:
        """Names of the modules in the names of this target's tensors in a file. Each module has an A and a B."""
        if not self._has_hosted_experts:
            return [self.peft_name or self.name]
        experts = self.name.rpartition(".")[0]
        return [f"{experts}.{projection}" for projection in self.projections]

    @property
    def pattern_modules(self) -> Sequence[str]:
        """Names of the modules to which the patterns of PEFT's configuration apply."""
        return self.peft_modules if self._has_hosted_experts else [self.name]

    @property
    def peft_names(self) -> Sequence[str]:
        """Names of the tensors in a file: A and B of each module."""
        return [f"{_PEFT_PREFIX}{module}.lora_{side}.weight" for module in self.peft_modules for side in "AB"]

    def peft_shapes(self, rank: int) -> Sequence[tuple[int, ...]]:
        """Shapes of the tensors in a file, in the order of `peft_names`.

        In PEFT's form, every expert has its own A and B: A is [E R, I], B is [O, R E]. In the hosted service's form, A
        is [E, R, I] and B [E, O, R], with 1 in place of E for the matrix that all experts share.
        """
        if self._has_hosted_experts:
            assert self.num_experts is not None
            a_experts, b_experts = (1, self.num_experts) if self.shared == "A" else (self.num_experts, 1)
            num_outputs = self.out_features // len(self.projections)
            return [(a_experts, rank, self.in_features), (b_experts, num_outputs, rank)] * len(self.projections)
        rows = rank * (self.num_experts or 1)
        return (rows, self.in_features), (self.out_features, rows)

    def to_peft(self, weights: LoraWeights) -> Sequence[Tensor]:
        """The tensors of a file, in the order of `peft_names`. PEFT's form repeats a matrix that all experts share,
        once for each expert."""
        if self.num_experts is None:
            return weights.a_R_I, weights.b_O_R
        if self._has_hosted_experts:
            a_E_R_I, b_E_O_R = (one if one.ndim == 3 else one[None] for one in (weights.a_R_I, weights.b_O_R))
            return [tensor for b in self._split(b_E_O_R) for tensor in (a_E_R_I.clone(), b)]
        a_E_R_I = weights.a_R_I.expand(self.num_experts, -1, -1)
        b_E_O_R = weights.b_O_R.expand(self.num_experts, -1, -1)
        return a_E_R_I.flatten(0, 1), b_E_O_R.permute(1, 2, 0).flatten(1)

    def _split(self, b_E_O_R: Tensor) -> Sequence[Tensor]:
        """B of each projection, [E, outputs of the projection, R]."""
        count = len(self.projections)
        return [b_E_O_R[:, n::count] for n in range(count)] if self.interleaved else b_E_O_R.chunk(count, dim=1)

    def from_peft(self, a: Tensor, b: Tensor, *others: Tensor) -> LoraWeights:
        """The inverse of to_peft. Raises InvalidRequest if the experts, or their two projections, differ in the matrix
        that they share here."""
        if self.num_experts is None:
            return LoraWeights(a, b)
        if self._has_hosted_experts:
            return self._from_hosted(a, b, *others)
        a_E_R_I = a.unflatten(0, (self.num_experts, -1))
        b_E_O_R = b.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        shared, name = (a_E_R_I, self.peft_names[0]) if self.shared == "A" else (b_E_O_R, self.peft_names[1])
        if not torch.equal(shared, shared[:1].expand_as(shared)):
            raise InvalidRequest(
                f"tensor {name!r}: the experts differ in lora_{self.shared}; adapters here have one lora_{self.shared} "
                f"of {self.name!r} for all its experts",
                field=name,
            )
        return LoraWeights(a_E_R_I[0], b_E_O_R) if self.shared == "A" else LoraWeights(a_E_R_I, b_E_O_R[0])

    def _from_hosted(self, a: Tensor, b: Tensor, *others: Tensor) -> LoraWeights:
        for n in range(0, len(others), 2):
            if not torch.equal(others[n], a):
                name = self.peft_names[2 + n]
                raise InvalidRequest(
                    f"tensor {name!r} differs from {self.peft_names[0]!r}; adapters here have one lora_A for both",
                    field=name,
                )
        parts = [b, *others[1::2]]
        b = torch.stack(parts, dim=2).flatten(1, 2) if self.interleaved else torch.cat(parts, dim=1)
        return LoraWeights(a[0], b) if self.shared == "A" else LoraWeights(a, b[0])


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """A and B of one target, which computes with W + scaling * B A. For experts, either A is [E, R, I] or B is
    [E, O, R] (see Target.shared)."""

    a_R_I: Tensor
    b_O_R: Tensor


class Adapter:
    """Low-rank weights for some targets of a base model.

    `flat` is float32 [numel]. `weights` maps a target's name to its A and B, which are views of `flat`.
    """

    def __init__(self, config: AdapterConfig, targets: Sequence[Target], flat: Tensor) -> None:
        self.config = config
        self.targets = chosen_targets(config, targets)
        self.flat = flat
        self._bytes_beside = 0
        """Bytes of weights that are not views of `flat`; see `rounded`."""
        self.weights: dict[str, LoraWeights] = {}
        parts = iter(flat.split([prod(shape) for _, shape in self._layout()]))
        for target in self.targets:
            a, b = next(parts), next(parts)
            a_shape, b_shape = target.shapes(config.rank)
            self.weights[target.name] = LoraWeights(a.view(a_shape), b.view(b_shape))

    @classmethod
    def create(cls, config: AdapterConfig, targets: Sequence[Target], device: torch.device) -> Adapter:
        """A new adapter with A ~ U(-1/sqrt(in), 1/sqrt(in)) and B = 0, so that the new model equals the base model.

        A depends on the seed only, not on the device. Without a seed it is random.
        """
        chosen = chosen_targets(config, targets)
        flat = torch.zeros(num_elements(config, chosen))
        generator = torch.Generator()
        if config.seed is None:
            generator.seed()
        else:
            generator.manual_seed(config.seed)
        adapter = cls(config, targets, flat)
        for target in chosen:
            bound = target.in_features**-0.5
            adapter.weights[target.name].a_R_I.uniform_(-bound, bound, generator=generator)
        return cls(config, targets, flat.to(device))

    @property
    def scaling(self) -> float:
        return self.config.scaling

    @property
    def num_bytes(self) -> int:
        return self.flat.nbytes + self._bytes_beside

    @property
    def sent_dtype(self) -> torch.dtype:
        """Type in which the weights are sent to the samplers."""
        return self.flat.dtype

    def sync(self) -> None:
        """Does nothing, because the forward pass reads the buffer itself. See TrainedWeights.sync."""

    def like(self, flat: Tensor) -> Adapter:
        """This adapter's layout over another buffer, such as a gradient or a moment."""
        other = copy(self)
        other.flat = flat
        parts = iter(_unflatten_dense_tensors(flat, self.tensors()))  # one call for all views
        other.weights = {name: LoraWeights(next(parts), next(parts)) for name in self.weights}
        return other

    def rounded(self, dtype: torch.dtype) -> Adapter:
        """A copy of this adapter for many passes that do not change it, with A and B in `dtype`, the type of the base
        model. Otherwise each pass would round them to this type. A and B of the output layer stay as they are, because
        its product is float32."""
        other = self.like(self.flat.to(dtype))
        for target in self.targets:
            if target.group == "unembed":
                own = self.weights[target.name]
                kept = LoraWeights(own.a_R_I.clone(), own.b_O_R.clone())
                other.weights[target.name] = kept
                other._bytes_beside += kept.a_R_I.nbytes + kept.b_O_R.nbytes
        return other

    def tensors(self) -> list[Tensor]:
        """A and B of every target, in the order of the buffer."""
        return [tensor for weights in self.weights.values() for tensor in (weights.a_R_I, weights.b_O_R)]

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, in the order of the buffer. Linear layers have PEFT's names."""
        return list(self._layout())

    def _layout(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for target in self.targets:
            for side, shape in zip("AB", target.shapes(self.config.rank), strict=True):
                yield f"{_PEFT_PREFIX}{target.name}.lora_{side}.weight", shape

    @property
    def peft_bytes(self) -> int:
        """Size of the tensors that save_peft writes."""
        return self.flat.itemsize * sum(
            (target.num_experts or 1) * tensor.shape[-2] * tensor.shape[-1]
            for target in self.targets
            for tensor in (self.weights[target.name].a_R_I, self.weights[target.name].b_O_R)
        )

    def with_tinker_names(self) -> Adapter:
        """These weights under the names of the hosted service's files."""
        return Adapter(self.config, [target.with_tinker_name() for target in self.targets], self.flat)

    def save_peft(self, folder: Path, *, base_model: str) -> None:
        """Writes adapter_config.json and adapter_model.safetensors. Stock PEFT loads them unchanged, unless the targets
        have the hosted service's names."""
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for target in self.targets
            for name, tensor in zip(target.peft_names, target.to_peft(self.weights[target.name]), strict=True)
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(self._peft_config(base_model), indent=2) + "\n")

    def _peft_config(self, base_model: str) -> Mapping[str, object]:
        fused = [target for target in self.targets if target.num_experts is not None]
        experts = {_last(module, 2) for target in fused for module in target.pattern_modules}
        layers = [target for target in self.targets if target.num_experts is None]
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.config.rank,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": _modules(layers),
            "inference_mode": True,
        }
        if any(target.fan_in_fan_out for target in layers):
            config["fan_in_fan_out"] = True
        if experts:
            # PEFT mistakes the name of a feed-forward layer in a model with fused experts for the name of an expert,
            # because experts were modules in earlier versions of transformers. The name of the layer's weight avoids
            # this, and the tensors stay as they are.
            config["target_modules"] = _modules([target for target in layers if target.group != "mlp"])
            # Beside a tower the whole names are given, because names of the tower's layers may end with the same two
            # words, as in GLM-5.3-Flash.
            experts |= {
                f"{target.name if '.' in _around_layers(target.name) else _last(target.name, 2)}.weight"
                for target in layers
                if target.group == "mlp"
            }
            config["target_parameters"] = sorted(experts)
        heads = [target for target in self.targets if target.group == "unembed"]
        if renamed := [target.name for target in heads if target.name == target.tinker_name]:
            # Stock PEFT silently leaves out the tensors of a layer that the model does not have, but it warns of a
            # pattern that fits no layer. The value of this pattern changes nothing.
            config["alpha_pattern"] = {_last(name, 1): ALPHA for name in renamed}
        return config

    @classmethod
    def load_peft(cls, folder: Path, config: AdapterConfig, targets: Sequence[Target]) -> Adapter:
        """Reads an adapter from a folder that save_peft wrote, into host memory.

        Raises InvalidRequest if its tensors do not fit `config` and `targets`.
        """
        stored = load_file(folder / "adapter_model.safetensors")
        adapter = cls(config, targets, torch.empty(num_elements(config, chosen_targets(config, targets))))
        theirs = [target.named_as_in(stored) for target in adapter.targets]
        shapes = {
            name: shape
            for target in theirs
            for name, shape in zip(target.peft_names, target.peft_shapes(config.rank), strict=True)
        }
        if set(shapes) != set(stored):
            odd = sorted(set(shapes) ^ set(stored))[0]
            raise InvalidRequest(f"checkpoint tensors do not fit this base model: {odd!r} is on one side only")
        for name, shape in shapes.items():
            if stored[name].shape != shape:
                raise InvalidRequest(
                    f"checkpoint tensor {name!r} has shape {list(stored[name].shape)}, not {list(shape)}"
                )
        for target, ours in zip(theirs, adapter.weights.values(), strict=True):
            weights = target.from_peft(*(stored[name] for name in target.peft_names))
            ours.a_R_I.copy_(weights.a_R_I)
            ours.b_O_R.copy_(weights.b_O_R)
        return adapter


def _modules(layers: Sequence[Target]) -> list[str] | str:
    """PEFT's target_modules for these layers: the ends of their names, or a regular expression for whole names."""
    of_text = [target for target in layers if target.group != VISION]
    ends = sorted({_last(target.name, 2 if target.ambiguous else 1) for target in of_text})
    nested = sorted({outer for target in of_text if "." in (outer := _around_layers(target.name))})
    # The name of a layer for pictures may end like the name of a layer of text.
    seeing = _numbered([target.name for target in layers if target.group == VISION])
    if not nested and not seeing:
        return ends
    # The model has other parts, such as an encoder of images, whose layers may end with the same names.
    pattern = rf"((?:{'|'.join(map(re.escape, nested))})\..*\.|)(?:{'|'.join(map(re.escape, ends))})"
    return "|".join([pattern, *seeing] if ends else seeing)


def _numbered(names: Sequence[str]) -> list[str]:
    """Regular expressions that match exactly these names. Names that differ only in their first number share one
    expression. A tower may have layers that are not among the names, because no feature depends on them."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        found = re.match(r"(.*?)\b(\d+)\b(.*)", name)
        before, number, after = (name, "", "") if found is None else found.groups()
        numbers.setdefault((before, after), []).append(number)
    return sorted(
        f"{re.escape(before)}(?:{'|'.join(found)}){re.escape(after)}" for (before, after), found in numbers.items()
    )


def _around_layers(name: str) -> str:
    """Name of the module that holds a layer's list of layers; empty if the layer belongs to no list."""
    found = re.match(r"(.+?)\.[^.]+\.\d+\.", name)
    return found[1] if found else ""


def _last(name: str, count: int) -> str:
    """The last `count` parts of a dotted name."""
    return ".".join(name.split(".")[-count:])


def groups_of(targets: Sequence[Target]) -> list[Group]:
    """The groups to which at least one of the targets belongs."""
    found = {target.group for target in targets}
    return [group for group in ALL_GROUPS if group in found]


def chosen_targets(
    config: AdapterConfig, targets: Sequence[Target], refused: Mapping[Group, str] = MappingProxyType({})
) -> list[Target]:
    """The targets that a configuration adapts. Raises Unsupported for a group that the base model cannot adapt, with
    the reason in `refused` if it is there."""
    missing = config.groups - {target.group for target in targets}
    if missing:
        reason = "this base model has no such layers that can be adapted"
        if missing == {VISION}:
            reason = "this base model has no vision tower that can be adapted here (pictures may be switched off)"
        field = f"lora_config.train_{min(missing)}"
        raise Unsupported(f"{field}: {refused.get(min(missing), reason)}; set it to false", field=field)
    return [target for target in targets if target.group in config.groups]


def num_elements(config: AdapterConfig, targets: Sequence[Target]) -> int:
    """Number of elements in the flat buffer of an adapter for `targets`, which are already chosen."""
    return sum(prod(shape) for target in targets for shape in target.shapes(config.rank))
