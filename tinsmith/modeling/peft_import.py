"""Converts a PEFT LoRA folder to an adapter that computes the same function.

    W + s B A,  s = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora     a layer in PEFT
    W + (32 / R) B' A'                                                          a layer here

R is the largest r of the adapter, and B' = s R / 32 B. A layer with r < R gets further rows of A', drawn as in a new
adapter, and further columns of B' that are zero. A layer without an adapter gets a whole A' drawn in this way, and
B' = 0. Later training may change all of these numbers. The experts of a fused layer must share the matrix that they
share here (experts.py).

A folder that holds anything else is refused, and the error names it. References: LoRA, arXiv:2106.09685;
rank-stabilised scaling, arXiv:2312.03732; the file format is that of huggingface/peft.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinsmith.errors import InvalidRequest
from tinsmith.modeling.adapter import ALPHA, VISION, Adapter, AdapterConfig, LoraWeights, Target
from tinsmith.modeling.peft_config import LayerScaling, PeftConfig
from tinsmith.modeling.peft_files import CONFIG, TensorFile, open_tensors

_NUM_SHOWN = 4

_FOREIGN = {
    "lora_embedding_": "adapters of embeddings",
    "lora_magnitude_vector": "DoRA",
    "lora_B.bias": "lora_bias",
    "modules_to_save": "whole modules (modules_to_save)",
}


@dataclass(frozen=True, slots=True)
class ImportedAdapter:
    """The result of an import."""

    adapter: Adapter
    """The adapter's weights, in host memory."""
    notes: Sequence[str]
    """Changes that the import made, for the user."""


def import_peft(
    folder: Path, targets: Sequence[Target], frozen: Mapping[str, Tensor], *, base_model: str, max_rank: int
) -> ImportedAdapter:
    """Reads adapter_config.json and adapter_model.safetensors.

    `targets`: the targets of the base model. `frozen`: weights of the base model's output layer and embedding, by the
    ends of their names; PEFT stores copies of them beside an adapted output layer. `base_model`: name of the base
    model. Raises InvalidRequest, naming the tensor or the key of the configuration.
    """
    config = PeftConfig.read(folder / CONFIG)
    with open_tensors(folder) as file:
        names = set(file.names)
        theirs = [target.named_as_in(names) for target in targets]
        pairs = _pairs(file, theirs, frozen)
        scalings = _scalings(config, pairs)
        for target in pairs:
            _check_pair(file, target, scalings[target.name].rank)
        rank = max(one.rank for one in scalings.values())
        if rank > max_rank:
            raise InvalidRequest(f"{CONFIG}: rank {rank} is above {max_rank}, this server's max_lora_rank", field="r")
        groups = {target.group for target in pairs}
        ours = AdapterConfig(
            rank,
            train_attn="attn" in groups,
            train_mlp="mlp" in groups,
            train_unembed="unembed" in groups,
            train_vision=VISION in groups,
        )
        adapter = Adapter.create(ours, theirs, torch.device("cpu"))
        for target in pairs:
            _copy(file, target, scalings[target.name], adapter.weights[target.name])
        dtypes = {file.dtype(name) for target in pairs for name in target.peft_names} - {torch.float32}
    notes = list(config.notes)
    if config.made_for not in ("", base_model):
        notes.append(f"the adapter says that it was made for {config.made_for!r}; it was imported for {base_model!r}")
    return ImportedAdapter(Adapter(ours, targets, adapter.flat), [*notes, *_notes(adapter, scalings, dtypes)])


def _scalings(config: PeftConfig, targets: Sequence[Target]) -> dict[str, LayerScaling]:
    """Rank and scaling of each target, by the target's name. Raises InvalidRequest if they differ between two modules
    of one target."""
    scalings = config.scalings([module for target in targets for module in target.pattern_modules])
    for target in targets:
        first, *others = target.pattern_modules
        for other in others:
            if scalings[other] != scalings[first]:
                key = "rank_pattern" if scalings[other].rank != scalings[first].rank else "alpha_pattern"
                raise InvalidRequest(
                    f"{CONFIG}: {key} differs between {first!r} and {other!r}, which are one layer here", field=key
                )
    return {target.name: scalings[target.pattern_modules[0]] for target in targets}


def _pairs(file: TensorFile, targets: Sequence[Target], frozen: Mapping[str, Tensor]) -> list[Target]:
    """The targets whose tensors are in the file. Raises InvalidRequest for a file with incomplete or unknown
    tensors."""
    modules = {module for target in targets for module in target.peft_modules}
    sides: dict[str, list[str]] = defaultdict(list)
    for name in file.names:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)
        if match is not None:
            if match[1] not in modules:
                raise InvalidRequest(
                    f"tensor {name!r}: the base model has no layer {match[1]!r} that can be adapted here", field=name
                )
            sides[match[1]].append(name)
        else:
            _check_frozen(file, name, frozen)
    if not sides:
        raise InvalidRequest(f"{file.path.name} holds no tensor of a LoRA adapter", field=file.path.name)
    for names in sides.values():
        if len(names) != 2:
            raise InvalidRequest(f"tensor {names[0]!r} is only one of a lora_A and a lora_B", field=names[0])
    for target in targets:
        found = [module for module in target.peft_modules if module in sides]
        if found and (missing := [module for module in target.peft_modules if module not in sides]):
            name = sides[found[0]][0]
            raise InvalidRequest(
                f"tensor {name!r}: the file has no adapter of {missing[0]!r}; here both are one layer", field=name
            )
    return [target for target in targets if target.peft_modules[0] in sides]


def _check_frozen(file: TensorFile, name: str, frozen: Mapping[str, Tensor]) -> None:
    """Raises InvalidRequest unless the tensor is a copy of a weight in `frozen`."""
    for mark, what in _FOREIGN.items():
        if mark in name:
            raise InvalidRequest(f"tensor {name!r}: {what} cannot be imported, only low-rank matrices", field=name)
    module = name.removesuffix(".weight").removesuffix(".base_layer")
    for end, weight in frozen.items():
        if name.endswith(".weight") and module.endswith(f".{end}"):
            stored = file.read(name) if file.shape(name) == tuple(weight.shape) else None
            if stored is not None and torch.equal(stored.to(weight), weight):
                return
            raise InvalidRequest(
                f"tensor {name!r} is a whole weight that differs from the base model's: only low-rank changes can be "
                "imported",
                field=name,
            )
    raise InvalidRequest(f"tensor {name!r} is not one of a LoRA adapter of linear layers", field=name)


def _check_pair(file: TensorFile, target: Target, rank: int) -> None:
    for name, shape in zip(target.peft_names, target.peft_shapes(rank), strict=True):
        if file.shape(name) != shape:
            raise InvalidRequest(
                f"tensor {name!r} has shape {list(file.shape(name))}, not {list(shape)} (r is {rank} there)", field=name
            )
        if not file.dtype(name).is_floating_point:
            raise InvalidRequest(f"tensor {name!r} holds {file.dtype(name)}, which is no float", field=name)


def _copy(file: TensorFile, target: Target, layer: LayerScaling, ours: LoraWeights) -> None:
    theirs = target.from_peft(*(_finite(file.read(name).float(), name) for name in target.peft_names))
    ours.a_R_I[..., : layer.rank, :] = theirs.a_R_I
    ours.b_O_R[..., : layer.rank] = theirs.b_O_R * (layer.scaling * ours.a_R_I.shape[-2] / ALPHA)
    _finite(ours.b_O_R, target.peft_names[1])


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise InvalidRequest(f"tensor {name!r} holds a number that is not finite in float32", field=name)
    return tensor


def _notes(adapter: Adapter, scalings: Mapping[str, LayerScaling], dtypes: set[torch.dtype]) -> list[str]:
    notes: list[str] = []
    rank = adapter.config.rank
    missing = [target.name for target in adapter.targets if target.name not in scalings]
    smaller = [name for name, one in scalings.items() if one.rank < rank]
    if missing:
        notes.append(f"{_listed(missing)}: not in the adapter; they start at zero, and are trained too")
    if smaller:
        notes.append(f"{_listed(smaller)}: padded to rank {rank}, which changes nothing that is computed")
    if any(not math.isclose(one.scaling, ALPHA / rank) for one in scalings.values()):
        notes.append(f"lora_alpha is {ALPHA} here, with rank {rank}: B was scaled so that the function is the same")
    if dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        notes.append(f"{names} was converted to float32")
    return notes


def _listed(modules: Sequence[str]) -> str:
    shown = ", ".join(modules[:_NUM_SHOWN])
    return shown if len(modules) <= _NUM_SHOWN else f"{shown} and {len(modules) - _NUM_SHOWN} more layers"
