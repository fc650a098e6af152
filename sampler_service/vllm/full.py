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
    """Names of the parameters that are stored column by column; see BaseModel.by_columns."""
    dtype: torch.dtype


class FullVersion(FullWeights):
    """Full weights in a process without a base model."""

    def __init__(self, parameters: Parameters, flat: Tensor, shared: SharedTensor | None = None) -> None:
        """`shared`: the shared memory of `flat`; None if `flat` is not in shared memory."""
        self.parameters = parameters
        self.flat = flat
        self.shared = shared

    @classmethod
    def arriving(cls, layout: FullVersion) -> FullVersion:
        """A version of this layout in new shared memory. Raises OutOfCapacity when there is no memory."""
        shared = SharedTensor(layout.flat.shape, layout.flat.dtype)
        return cls(layout.parameters, shared.tensor, shared)

    @property
    def sent_dtype(self) -> torch.dtype:
        return self.parameters.dtype

    def like(self, flat: Tensor) -> FullVersion:
        return FullVersion(self.parameters, flat)

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return list(self.parameters.shapes.items())
