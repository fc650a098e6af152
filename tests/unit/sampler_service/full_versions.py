"""Versions that replace all parameters of the base model."""

from __future__ import annotations

from pathlib import Path

import torch

from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights


def make_full(base: BaseModel, *, seed: int) -> FullWeights:
    """The base model's parameters with some noise."""
    noise = torch.Generator().manual_seed(seed)
    numel = sum(parameter.numel() for parameter in base.parameters.values())
    weights = FullWeights(base, torch.empty(numel))
    for tensor, parameter in zip(weights.tensors(), base.parameters.values(), strict=True):
        tensor.copy_(parameter)
    weights.flat += 0.05 * torch.randn(numel, generator=noise)
    return weights


def save(weights: FullWeights, folder: Path) -> Path:
    folder.mkdir()
    weights.save_model(folder, dtype=torch.float32)
    return folder
