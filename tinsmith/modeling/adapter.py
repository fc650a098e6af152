"""An adapter's tensors: one flat buffer, every A and B a view of it, and the PEFT files that they become.

One buffer means that an optimizer step is a few operations, a snapshot is one copy, and a publish is one broadcast.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.rpc.errors import InvalidRequest, Unsupported
from tinsmith.v1 import types_pb2 as pb

ALPHA = 32
"""lora_alpha of every adapter, whatever its rank, so that a learning rate keeps its meaning when the rank changes."""

GROUPS = ("attn", "mlp", "unembed")
Group = Literal["attn", "mlp", "unembed"]

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What Tinker's lora_config says."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int | None = None

    @classmethod
    def from_proto(cls, config: pb.LoraConfig, *, max_rank: int) -> AdapterConfig:
        """Raises InvalidRequest for a rank outside 1..max_rank, and when nothing would be trained."""
        if not 1 <= config.rank <= max_rank:
            raise InvalidRequest(
                f"lora_config.rank: {config.rank} is outside 1..{max_rank}, this server's max_lora_rank", field="rank"
            )
        if not (config.train_attn or config.train_mlp or config.train_unembed):
            raise InvalidRequest(
                "lora_config: at least one of train_attn, train_mlp and train_unembed must be true", field="lora_config"
            )
        return cls(
            rank=config.rank,
            train_attn=config.train_attn,
            train_mlp=config.train_mlp,
            train_unembed=config.train_unembed,
            seed=config.seed if config.HasField("seed") else None,
        )

    def to_proto(self) -> pb.LoraConfig:
        return pb.LoraConfig(
            rank=self.rank,
            seed=self.seed,
            train_attn=self.train_attn,
            train_mlp=self.train_mlp,
            train_unembed=self.train_unembed,
        )

    @property
    def groups(self) -> set[Group]:
        chosen = zip(GROUPS, (self.train_attn, self.train_mlp, self.train_unembed), strict=True)
        return {group for group, wanted in chosen if wanted}

    @property
    def scaling(self) -> float:
        return ALPHA / self.rank


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer that adapters may change."""

    name: str
    """Path of the module in the Hugging Face model."""
    group: Group
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """W + scaling * B A."""

    a_R_I: Tensor
    b_O_R: Tensor


class Adapter:
    """Low-rank weights for some targets of a base model.

    `flat` is float32 [numel]. `weights` maps a target's name to views of it.
    """

    def __init__(self, config: AdapterConfig, targets: Sequence[Target], flat: Tensor) -> None:
        self.config = config
        self.targets = chosen_targets(config, targets)
        self.flat = flat
        self.weights: dict[str, LoraWeights] = {}
        parts = iter(flat.split([prod(shape) for _, shape in self._layout()]))
        for target in self.targets:
            a, b = next(parts), next(parts)
            self.weights[target.name] = LoraWeights(
                a.view(config.rank, target.in_features), b.view(target.out_features, config.rank)
            )

    @classmethod
    def create(cls, config: AdapterConfig, targets: Sequence[Target], device: torch.device) -> Adapter:
        """A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0: the new model equals the base model.

        The same seed gives the same A on every device; without a seed it is random.
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
        return self.flat.nbytes

    def like(self, flat: Tensor) -> Adapter:
        """The same layout over another buffer, such as a gradient or a moment."""
        return Adapter(self.config, self.targets, flat)

    def tensors(self) -> list[Tensor]:
        """A and B of every target, in the order of the buffer."""
        return [tensor for weights in self.weights.values() for tensor in (weights.a_R_I, weights.b_O_R)]

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """PEFT name and shape of every tensor, in the order of the buffer."""
        return list(self._layout())

    def _layout(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for target in self.targets:
            yield f"{_PEFT_PREFIX}{target.name}.lora_A.weight", (self.config.rank, target.in_features)
            yield f"{_PEFT_PREFIX}{target.name}.lora_B.weight", (target.out_features, self.config.rank)

    def save_peft(self, folder: Path, *, base_model: str) -> None:
        """Writes adapter_config.json and adapter_model.safetensors, which stock PEFT and vLLM load unchanged."""
        names = [name for name, _ in self._layout()]
        tensors = {name: t.detach().cpu().contiguous() for name, t in zip(names, self.tensors(), strict=True)}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(self._peft_config(base_model), indent=2) + "\n")

    def _peft_config(self, base_model: str) -> Mapping[str, object]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.config.rank,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({target.name.rsplit(".", 1)[-1] for target in self.targets}),
            "inference_mode": True,
        }

    @classmethod
    def load_peft(cls, folder: Path, config: AdapterConfig, targets: Sequence[Target]) -> Adapter:
        """The adapter in a folder that save_peft wrote, in host memory.

        Raises InvalidRequest when the tensors are not those of `config` on these targets.
        """
        stored = load_file(folder / "adapter_model.safetensors")
        adapter = cls(config, targets, torch.empty(num_elements(config, chosen_targets(config, targets))))
        names = [name for name, _ in adapter._layout()]
        if set(names) != set(stored):
            odd = sorted(set(names) ^ set(stored))[0]
            raise InvalidRequest(f"checkpoint tensors do not fit this base model: {odd!r} is on one side only")
        for name, tensor in zip(names, adapter.tensors(), strict=True):
            if stored[name].shape != tensor.shape:
                raise InvalidRequest(
                    f"checkpoint tensor {name!r} has shape {list(stored[name].shape)}, not {list(tensor.shape)}"
                )
            tensor.copy_(stored[name])
        return adapter


def chosen_targets(config: AdapterConfig, targets: Sequence[Target]) -> list[Target]:
    """The targets that a configuration adapts. Raises Unsupported for a group that the base model cannot adapt."""
    missing = config.groups - {target.group for target in targets}
    if missing:
        raise Unsupported(
            f"lora_config.train_{min(missing)}: this base model has no such layers that can be adapted; set it to false"
        )
    return [target for target in targets if target.group in config.groups]


def num_elements(config: AdapterConfig, targets: Sequence[Target]) -> int:
    """Elements of the flat buffer of an adapter for these (already chosen) targets."""
    return sum(config.rank * (target.in_features + target.out_features) for target in targets)
