"""The data side of the weight channel: a process group of one trainer (rank 0) and its samplers.

It stands apart from torch.distributed's default group, which belongs to data or tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Backend = Literal["gloo", "nccl"]


def open_store(host: str, *, timeout_s: float) -> dist.TCPStore:
    """The trainer's rendezvous, on a port that the kernel chooses (`store.port`). It outlives the groups."""
    return dist.TCPStore(
        host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, use_libuv=True
    )


def join_store(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """A sampler's connection to it. Raises RuntimeError when the trainer cannot be reached."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """One epoch of the channel. After an error it is of no use: form the next one."""

    process_group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    rank: int
    world_size: int
    epoch: int

    @classmethod
    def form(
        cls,
        store: dist.Store,
        *,
        epoch: int,
        rank: int,
        world_size: int,
        backend: Backend,
        host: str,
        timeout_s: float,
    ) -> WeightGroup:
        """Blocks until all ranks have come, or raises RuntimeError after `timeout_s` seconds.

        `host` is the address of this process that the other ranks can reach (gloo).
        """
        prefix = dist.PrefixStore(f"weights/{epoch}", store)
        timeout = timedelta(seconds=timeout_s)
        if backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return cls(dist.ProcessGroupNCCL(prefix, rank, world_size, nccl), rank, world_size, epoch)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return cls(dist.ProcessGroupGloo(prefix, rank, world_size, options), rank, world_size, epoch)

    def broadcast(self, tensor: Tensor) -> None:
        """Sends rank 0's tensor to all others, in place. Blocks; raises RuntimeError when a rank is lost."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        group: Any = self.process_group  # the stubs lack the overload with options
        group.broadcast([tensor], options).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
