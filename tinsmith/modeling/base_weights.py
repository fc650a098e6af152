"""A sum by which the weights of base models are told apart that have one name and one shape."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

_SAMPLES = 1024


def sum_of(parameters: Iterable[Tensor]) -> str:
    """XXH3-128, in hexadecimal, of at most 1024 numbers of each parameter, evenly spread over it, as bfloat16.

    It does not depend on whether they are float32 or bfloat16, nor on their order and names, which another version of
    transformers may change. Training on, or merging an adapter, changes it; changing a few numbers by hand may not.
    """
    samples = [_sample(one) for one in parameters]
    numbers = torch.cat(samples).cpu().split([len(one) for one in samples])  # one transfer from the device
    digests = sorted(xxhash.xxh3_128_digest(one.numpy().tobytes()) for one in numbers)
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def _sample(parameter: Tensor) -> Tensor:
    """int16 [at most _SAMPLES]."""
    flat = parameter.detach().flatten()
    step = -(-flat.numel() // _SAMPLES) | 1  # odd: not all from one column of a matrix
    return flat[::step].to(torch.bfloat16).view(torch.int16)
