"""Adapters to test with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tinsmith.modeling.adapter import Adapter, AdapterConfig, Target


def random_adapter(targets: Sequence[Target], *, seed: int, b_std: float = 0.1, **config: Any) -> Adapter:
    """An adapter whose B is random instead of zero, so that it changes the model and every gradient lives. All tensors
    require gradients. `config`: other fields of AdapterConfig."""
    adapter = Adapter.create(AdapterConfig(seed=seed, **config), targets, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for weights in adapter.weights.values():
        weights.b_O_R.normal_(0, b_std, generator=generator)
    for tensor in adapter.tensors():
        tensor.requires_grad_()
    return adapter
