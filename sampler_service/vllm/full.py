"""Versions of all parameters as the vLLM engine holds them: in shared memory, into which the weight channel writes, and
from which its worker takes them when it is their turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sampler_service.vllm.shared_memory import SharedTensor
from tinsmith.modeling.full_weights import FullWeights


@dataclass(frozen=True, slots=True)
class Parameters:
    """Shapes and types of a base model's parameters, for a process without the model."""

    shapes: Mapping[str, tuple[int, ...]]
    by_columns: frozenset[str]
    """As BaseModel.by_columns."""
    dtype: torch.dtype


class FullVersion(FullWeights):
    """Without a base model in this process."""

    def __init__(self, parameters: Parameters, flat: Tensor, shared: SharedTensor | None = None) -> None:
        """`shared` is the memory of `flat`, where that is shared."""
        self.parameters = parameters
        self.flat = flat
        self.shared = shared

    @classmethod
    def arriving(cls, layout: FullVersion) -> FullVersion:
        """Over new shared memory. Raises OutOfCapacity when there is none."""
        shared = SharedTensor(layout.flat.shape, layout.flat.dtype)
        return cls(layout.parameters, shared.tensor, shared)

    @property
    def sent_dtype(self) -> torch.dtype:
        return self.parameters.dtype

    def like(self, flat: Tensor) -> FullVersion:
        return FullVersion(self.parameters, flat)

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return list(self.parameters.shapes.items())
