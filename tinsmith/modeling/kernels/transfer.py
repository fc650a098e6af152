"""Copies small tables from the host to the device without waiting for the device.

A copy from pageable memory makes the host wait until the device has caught up. A copy from pinned memory does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the tensor itself on a CPU."""
    if device.type == "cuda" and host.device.type == "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def table(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A one-dimensional tensor of these values, on the device."""
    return on_device(torch.tensor(values, dtype=dtype), device)
