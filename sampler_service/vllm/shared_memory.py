"""Tensors in memory that the engine's process maps too: no files, no names, and none of /dev/shm, which is small in
containers. The kernel frees it when the last process lets go. Linux only.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tinsmith.rpc.errors import OutOfCapacity


@dataclass(frozen=True, slots=True)
class Handle:
    """Where another process finds the memory."""

    pid: int
    fd: int
    num_bytes: int

    def open(self) -> Tensor:
        """float32, one dimension. What is written to it stays in this process. Raises OSError when it is gone."""
        with open(f"/proc/{self.pid}/fd/{self.fd}", "rb") as file:
            memory = mmap.mmap(file.fileno(), self.num_bytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=torch.float32)


class SharedTensor:
    """A float32 copy of a tensor. close() takes it from processes that have not opened it; views stay valid."""

    def __init__(self, tensor: Tensor) -> None:
        """Raises OutOfCapacity when there is no memory."""
        num_bytes = 4 * prod(tensor.shape)
        self._fd = os.memfd_create("tinsmith-weights")
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)  # now, and not as a SIGBUS later
            memory = mmap.mmap(self._fd, num_bytes)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise OutOfCapacity(
                f"there is no memory on this sampler for {num_bytes} bytes of weights ({error})"
            ) from error
        self.tensor = torch.frombuffer(memory, dtype=torch.float32).view(tensor.shape)
        self.tensor.copy_(tensor)
        self.handle = Handle(os.getpid(), self._fd, num_bytes)

    def close(self) -> None:
        os.close(self._fd)
