"""Faults of the device: after one of them every further computation in this process fails."""

from __future__ import annotations

import torch

from trainer_service.engine.memory import is_out_of_memory

_BEGINNINGS = ("CUDA error:", "CUDA driver error:", "cuDNN error:", "Triton Error [CUDA]:")
"""Beginnings of the messages of those faults that torch raises as RuntimeError, not as AcceleratorError."""


def is_device_fault(error: BaseException) -> bool:
    """True for an illegal memory access, a device-side assert and the like. Lack of memory is not a fault.

    CUDA repeats such a fault until the process ends. A few errors that CUDA does not repeat look the same. For them,
    too, a restart is right: it runs the operation again.
    """
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith(_BEGINNINGS)
    )
