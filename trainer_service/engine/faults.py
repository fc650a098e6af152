"""Faults of the device: after one of them nothing computes in this process any more, whoever asks."""

from __future__ import annotations

import torch

from trainer_service.engine.memory import is_out_of_memory

_BEGINNINGS = ("CUDA error:", "CUDA driver error:", "cuDNN error:", "Triton Error [CUDA]:")
"""Beginnings of the RuntimeError for a fault that is not raised as torch.AcceleratorError."""


def is_device_fault(error: BaseException) -> bool:
    """True for an illegal memory access, a device-side assert and the like. A lack of memory is none.

    CUDA keeps such a fault until the process ends. A few errors that it does not keep look like it: a restart, which
    runs the operation again, is right after those, too.
    """
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith(_BEGINNINGS)
    )
