"""Tensors in memory that the engine's process maps too: no files, no names, and none of /dev/shm, which is small in
containers. The kernel frees it when the last process lets go. Linux only.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from tinsmith.errors import OutOfCapacity
from tinsmith.memory import host_bytes


@dataclass(frozen=True, slots=True)
class Handle:
    """Identifies the memory to another process."""

    pid: int
    fd: int
    num_bytes: int
    dtype: str = "float32"

    def open(self) -> Tensor:
        """The memory as a tensor of one dimension. Writes to it stay in this process. Raises OSError when it is
        gone."""
        with open(f"/proc/{self.pid}/fd/{self.fd}", "rb") as file:
            memory = mmap.mmap(file.fileno(), self.num_bytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=getattr(torch, self.dtype))


class SharedTensor:
    """A tensor in shared memory. close(), or its end, takes it from processes that have not opened it; views of it stay
    valid."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Makes a tensor of zeros. Raises OutOfCapacity when there is no memory."""
        num_bytes = dtype.itemsize * prod(shape)
        available = host_bytes()
        if num_bytes > available:  # the kernel would hand out pages until it ends some process
            raise OutOfCapacity(
                f"there is no memory on this sampler for {num_bytes} bytes of weights ({available} are available)"
            )
        fd = os.memfd_create("tinsmith-weights")
        try:
            os.posix_fallocate(fd, 0, num_bytes)  # now, and not as a SIGBUS later
            memory = mmap.mmap(fd, num_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise OutOfCapacity(
                f"there is no memory on this sampler for {num_bytes} bytes of weights ({error})"
            ) from error
        self._closing = weakref.finalize(self, os.close, fd)
        self.tensor = torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
        self.handle = Handle(os.getpid(), fd, num_bytes, str(dtype).removeprefix("torch."))

    @classmethod
    def copy_of(cls, tensor: Tensor) -> Self:
        """A copy of a tensor, with its type. Raises OutOfCapacity when there is no memory."""
        shared = cls(tensor.shape, tensor.dtype)
        shared.tensor.copy_(tensor)
        return shared

    def close(self) -> None:
        self._closing()
