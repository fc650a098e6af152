"""A sum by which the weights of base models are told apart that have one name and one shape."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

_SAMPLES = 1024


def sum_of(parameters: Iterable[Tensor]) -> str:
    """XXH3-128, in hexadecimal, of some thousand numbers, evenly spread over each parameter, as bfloat16: the same for
    float32 and bfloat16, and read in no time. Training on, or merging an adapter, changes it; changing a few numbers by
    hand may not."""
    return xxhash.xxh3_128_hexdigest(torch.cat([_sample(one) for one in parameters]).cpu().numpy().tobytes())


def _sample(parameter: Tensor) -> Tensor:
    """int16 [at most _SAMPLES]."""
    flat = parameter.detach().flatten()
    step = -(-flat.numel() // _SAMPLES) | 1  # odd: not all from one column of a matrix
    return flat[::step].to(torch.bfloat16).view(torch.int16)
