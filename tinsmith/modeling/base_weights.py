"""A checksum that distinguishes the weights of base models with the same name and shapes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

_SAMPLES = 1024


def sum_of(parameters: Iterable[Tensor], samples: Iterable[Tensor] = ()) -> str:
    """XXH3-128, in hexadecimal, of at most 1024 numbers of each parameter, evenly spread over it, as bfloat16.
    `samples`: samples of further parameters, from `sample_of`.

    The checksum is the same for float32 and bfloat16, and for any order and names of the parameters, which another
    version of transformers may change. Further training changes it, and so does merging an adapter. Changing a few
    numbers by hand may not.
    """
    samples = [*(sample_of(one) for one in parameters), *samples]
    lengths = [len(one) for one in samples]
    device = samples[0].device  # the samples of quantised layers may be on another device than the others
    numbers = torch.cat([one.to(device) for one in samples]).cpu().split(lengths)  # one transfer from the device
    digests = sorted(xxhash.xxh3_128_digest(one.numpy().tobytes()) for one in numbers)
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def sample_of(parameter: Tensor) -> Tensor:
    """int16 [n], n <= _SAMPLES: the bits of n numbers of the parameter, rounded to bfloat16."""
    flat = parameter.detach().flatten()
    step = -(-flat.numel() // _SAMPLES) | 1  # odd, so that the samples are not all from one column of a matrix
    # The conversion copies the samples; a view would keep the whole parameter in memory.
    return flat[::step].to(torch.bfloat16).contiguous().view(torch.int16)
