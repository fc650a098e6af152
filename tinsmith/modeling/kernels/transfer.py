"""Small tables from the host to the device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def table(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A one-dimensional tensor on the device. On CUDA it goes through pinned memory: pageable memory would make the
    host wait until the device has caught up."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
