"""Functions of optional packages for recurrent layers on CUDA.

flash-linear-attention computes the gated delta rule, causal-conv1d the convolution, and mamba-ssm Mamba2's scan. Each
takes the borders of packed sequences. Without a package, the torch code of this folder runs on CUDA, too.

flash-linear-attention's forward has run on an H200. No test has run its backward, or the other two packages, on a GPU.
Their calls are tested against stand-ins that compute the same in torch.

transformers calls the packages by itself wherever they can be imported, also on a CPU and in float32, where they fail.
`where_it_works` prevents this.

Shapes: T packed tokens, B sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, wraps
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import Tensor

Name = Literal["causal_conv1d_fn", "chunk_gated_delta_rule", "mamba_chunk_scan_combined"]
_MODULES: dict[Name, str] = {
    "causal_conv1d_fn": "causal_conv1d",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "mamba_chunk_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
}


_DELTA_RULE = ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule")
"""Names of flash-linear-attention's function, here and in transformers."""


def function(name: Name, x: Tensor) -> Callable[..., Any] | None:
    """The package's function, if it takes x and the package can be imported; else None."""
    return _imported(name) if _takes(name, x) else None


def where_it_works(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `theirs`, a function of transformers that calls a package, so that it computes in torch where the package
    cannot."""
    in_torch: Callable[..., Any] = theirs.__wrapped__  # type: ignore[attr-defined]
    known = inspect.signature(in_torch).parameters

    @wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        x = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        if _takes(in_torch.__name__, x):
            return theirs(*args, **kwargs)
        return in_torch(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call


def _takes(name: str, x: Tensor) -> bool:
    """Whether a package's function takes x. All functions need CUDA. flash-linear-attention's delta rule does not take
    float32, and has no gradient on some machines."""
    if x.device.type != "cuda":
        return False
    if name not in _DELTA_RULE:
        return True
    return x.dtype != torch.float32 and (not torch.is_grad_enabled() or _has_gradient(x.device))


@cache
def _has_gradient(device: torch.device) -> bool:
    """Whether flash-linear-attention's delta rule has a gradient on this device. On Hopper, the versions of Triton from
    3.4 to before 3.7.1 compile the gradient wrongly, so flash-linear-attention refuses it unless tilelang is installed
    (https://github.com/fla-org/flash-linear-attention/issues/640). flash-linear-attention before 0.6 refuses Triton
    3.7.1, too."""
    if torch.cuda.get_device_capability(device)[0] != 9 or find_spec("tilelang") is not None:
        return True
    try:
        triton, fla = (Version(metadata.version(name)) for name in ("triton", "flash-linear-attention"))
    except metadata.PackageNotFoundError:
        return False
    return triton < Version("3.4") or (triton >= Version("3.7.1") and fla >= Version("0.6"))


@cache
def _imported(name: Name) -> Callable[..., Any] | None:
    try:
        return getattr(import_module(_MODULES[name]), name, None)
    except (ImportError, OSError):  # OSError: a library of CUDA's that does not fit
        return None


def numbers_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The number of each token's sequence, int32 [1, T]."""
    return _numbers(tuple(lengths), device)


def borders_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The first token of each sequence, then T: int64 [B + 1]."""
    return _borders(tuple(lengths), device)


@lru_cache(maxsize=4)
def _numbers(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return numbers[None].to(device)


@lru_cache(maxsize=4)
def _borders(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device)
