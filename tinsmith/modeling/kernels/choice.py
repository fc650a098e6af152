"""Chooses the kernels with which a base model runs."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.grouped_lora import GroupedMM, Groups, torch_grouped_mm
from tinsmith.modeling.kernels.compiled import CannotCompile, attempt, compiled, first_lines
from tinsmith.modeling.kernels.cpu import CPU
from tinsmith.modeling.kernels.elementwise import Elementwise
from tinsmith.modeling.kernels.flash_attn import FlashAttn
from tinsmith.modeling.kernels.liger import liger
from tinsmith.modeling.kernels.varlen import Kernel, TorchVarlen

logger = logging.getLogger(__name__)

Setting = Literal["auto", "plain", "compiled", "liger"]

_GROUPED_MM_MAJORS = (9, 10)
"""Major compute capabilities for which torch has a kernel for grouped products. On other devices torch loops over the
groups, and makes the host wait for the device."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a base model. None stands for the plain implementation, which works for all models and devices."""

    attention: Kernel | None = None
    grouped_mm: GroupedMM | None = None
    elementwise: Elementwise | None = None

    def groups(self, runs: Sequence[Run], num_rows: int, device: torch.device) -> Groups | None:
        """The runs in the form for grouped products; None if grouped products are not used."""
        return Groups.of(runs, num_rows, device, self.grouped_mm) if self.grouped_mm is not None else None

    def __str__(self) -> str:
        attention = "SDPA by length" if self.attention is None else type(self.attention).__name__
        lora = "one tenant after the other" if self.grouped_mm is None else "grouped"
        elementwise = "eager" if self.elementwise is None else self.elementwise.name
        return f"attention {attention}, LoRA {lora}, norms, rotations and SwiGLU {elementwise}"


PLAIN = Kernels()


def choose(setting: Setting, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels for a setting on this device.

    `auto` takes the kernels that are available: on CUDA, variable-length attention, grouped products, and the
    elementwise kernels of Liger or else of torch.compile; on a CPU, the elementwise functions of cpu.py. `plain` takes
    none. `compiled` and `liger` are like `auto` with these elementwise kernels. Raises ValueError if the named kernels
    do not work here.
    """
    if setting == "plain":
        return PLAIN
    on_cuda = device.type == "cuda"
    return Kernels(
        attention=_attention() if on_cuda and dtype in (torch.bfloat16, torch.float16) else None,
        grouped_mm=torch_grouped_mm if on_cuda and dtype == torch.bfloat16 and _has_grouped_mm(device) else None,
        elementwise=_elementwise(setting, device, dtype),
    )


def _attention() -> Kernel:
    try:
        return FlashAttn(importlib.import_module("flash_attn.flash_attn_interface"))
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            logger.warning("flash-attn is installed but cannot be used; torch's kernel is used instead: %s", error)
        return TorchVarlen()


def _has_grouped_mm(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in _GROUPED_MM_MAJORS


def _elementwise(setting: Setting, device: torch.device, dtype: torch.dtype) -> Elementwise | None:
    if setting == "auto" and device.type == "cpu":
        return CPU if dtype in (torch.float32, torch.bfloat16) else None
    reasons = []
    if setting == "liger" or (setting == "auto" and device.type == "cuda"):
        try:
            return _liger(device, dtype)
        except ImportError as error:
            reasons.append(f"liger: {error}")
    if setting == "compiled" or (setting == "auto" and device.type == "cuda"):
        try:
            return compiled(device, dtype)
        except CannotCompile as error:
            reasons.append(f"compiled: {error}")
    if setting != "auto":
        raise ValueError(f"kernels: {setting!r} does not work here: {'; '.join(reasons)}")
    if reasons:
        logger.info("norms, rotations and SwiGLU stay eager: %s", "; ".join(reasons))
    return None


def _liger(device: torch.device, dtype: torch.dtype) -> Elementwise:
    """Liger's kernels. Raises ImportError if the package is missing, or if its kernels do not work on this device."""
    if device.type != "cuda":
        raise ImportError(f"its kernels run on CUDA, not on {device.type}")
    backend = liger(importlib.import_module("liger_kernel.ops"))
    try:
        attempt(backend, device, dtype)
    except Exception as error:  # Triton compiles here, and raises errors of many types
        logger.warning("liger-kernel is installed but does not work here: %s", first_lines(error))
        raise ImportError(first_lines(error)) from error
    return backend
