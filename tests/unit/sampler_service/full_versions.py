"""Versions that replace all parameters of the base model."""

from __future__ import annotations

from pathlib import Path

import torch

from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights


def make_full(base: BaseModel, *, seed: int) -> FullWeights:
    """The base model's parameters with some noise."""
    noise = torch.Generator().manual_seed(seed)
    flat = torch.cat([parameter.detach().reshape(-1).float() for parameter in base.parameters.values()])
    return FullWeights(base, flat + 0.05 * torch.randn(flat.shape, generator=noise))


def save(weights: FullWeights, folder: Path) -> Path:
    folder.mkdir()
    weights.save_model(folder, dtype=torch.float32)
    return folder
