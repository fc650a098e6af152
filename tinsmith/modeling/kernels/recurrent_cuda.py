"""Functions of other packages for recurrent layers on CUDA, where they are installed.

flash-linear-attention computes the gated delta rule, causal-conv1d the convolution, and mamba-ssm Mamba2's scan. Each
takes the borders of packed sequences. Without a package, the torch code of this folder runs on CUDA, too. No test here
has run these packages on a GPU: the calls are held by functions that compute the same with torch.

Shapes: T packed tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

Name = Literal["causal_conv1d_fn", "chunk_gated_delta_rule", "mamba_chunk_scan_combined"]
_MODULES: dict[Name, str] = {
    "causal_conv1d_fn": "causal_conv1d",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "mamba_chunk_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
}


def function(name: Name, x: Tensor) -> Callable[..., Any] | None:
    """The package's function, if x is on CUDA and the package can be imported. flash-linear-attention's does not take
    float32."""
    if x.device.type != "cuda" or (name == "chunk_gated_delta_rule" and x.dtype == torch.float32):
        return None
    return _imported(name)


@cache
def _imported(name: Name) -> Callable[..., Any] | None:
    try:
        return getattr(import_module(_MODULES[name]), name, None)
    except (ImportError, OSError):  # OSError: a library of CUDA's that does not fit
        return None


def numbers_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 [1, T]: the number of each token's sequence."""
    return _numbers(tuple(lengths), device)


def borders_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int64 [B + 1]: the first token of each sequence, and T."""
    return _borders(tuple(lengths), device)


@lru_cache(maxsize=4)
def _numbers(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return numbers[None].to(device)


@lru_cache(maxsize=4)
def _borders(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device)
