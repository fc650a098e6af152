"""Recognises errors of a computation that mean that memory has run out, or that the device has failed."""

from __future__ import annotations

import torch

_CPU_MESSAGES = ("can't allocate memory", "not enough memory", "std::bad_alloc")
"""Parts of the messages of the RuntimeError that torch's CPU allocator raises."""
_CUDA_MESSAGES = (
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "[CUDA]: out of memory",
    "_STATUS_ALLOC_FAILED",
)
"""Parts of the messages of a RuntimeError when other allocators than torch's fail: pinned memory, Triton, cuBLAS."""
_DEVICE_FAULTS = ("CUDA error:", "CUDA driver error:", "cuDNN error:", "Triton Error [CUDA]:")
"""Beginnings of the messages of those device faults that torch raises as RuntimeError, not as AcceleratorError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory of the host or of a GPU has run out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in (*_CPU_MESSAGES, *_CUDA_MESSAGES)
    )


def is_device_fault(error: BaseException) -> bool:
    """True for an illegal memory access, a device-side assert and the like. Lack of memory is not a fault.

    CUDA repeats such a fault until the process ends. A few errors that CUDA does not repeat look the same. For them,
    too, a restart is right: it runs the operation again.
    """
    if is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith(_DEVICE_FAULTS)
    )


def is_lasting_fault(error: BaseException) -> bool:
    """True for a fault of the device after which it computes nothing more. Where weights move between GPUs, some
    operations of CUDA fail on some machines, with the same type of error, and the device goes on."""
    return is_device_fault(error) and not _computes()


def _computes() -> bool:
    """Whether the CUDA device can still add two numbers."""
    try:
        torch.ones(1, device="cuda").add(1).item()
    except AssertionError:  # torch was built without CUDA
        return True
    except RuntimeError as error:
        return not is_device_fault(error)
    return True
