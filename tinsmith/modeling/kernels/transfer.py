"""Small tables from the host to the device, without waiting for the device.

From pageable memory a copy makes the host wait until the device has caught up; from pinned memory it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; on a CPU it is the same one."""
    if device.type == "cuda" and host.device.type == "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def table(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A one-dimensional tensor of these values, on the device."""
    return on_device(torch.tensor(values, dtype=dtype), device)
