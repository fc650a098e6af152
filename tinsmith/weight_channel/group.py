"""Transports gloo and nccl: a process group of one trainer (rank 0) and its samplers.

It stands apart from torch.distributed's default group, which belongs to data or tensor parallelism.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tinsmith.weight_channel.transport import Wait, bucket_timeout_s

Backend = Literal["gloo", "nccl"]


def open_store(host: str, *, timeout_s: float) -> dist.TCPStore:
    """The trainer's rendezvous, on a port that the kernel chooses (`store.port`). It outlives the groups.

    It is open to whoever reaches it, so it listens on `host` alone: left to itself torch would take all addresses.
    Raises RuntimeError when `host` is no address of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise RuntimeError(f"channel_host: {host!r} is no address of this machine ({error})") from error
    with listener:
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """A sampler's connection to it. Raises RuntimeError when the trainer cannot be reached."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """One epoch of the channel: an Outlet on rank 0, an Inlet elsewhere."""

    process_group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    store: dist.Store
    """Of this epoch alone."""
    rank: int
    world_size: int
    epoch: int
    device: str

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
        prefix = dist.PrefixStore(f"weights/{epoch}/{backend}", store)
        timeout = timedelta(seconds=timeout_s)
        if backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            group = dist.ProcessGroupNCCL(prefix, rank, world_size, nccl)
            return cls(group, prefix, rank, world_size, epoch, "cuda")
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        group = dist.ProcessGroupGloo(prefix, rank, world_size, options)
        return cls(group, prefix, rank, world_size, epoch, "cpu")

    def broadcast(self, tensor: Tensor) -> Wait:
        """Begins to send rank 0's tensor to all others, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=bucket_timeout_s(tensor.nbytes))
        group: Any = self.process_group  # the stubs lack the overload with options
        work = group.broadcast([tensor], options)

        def wait() -> None:
            work.wait()
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)

        return wait

    def send(self, bucket: Tensor) -> Wait:
        return self.broadcast(bucket.to(self.device))

    def receive(self, bucket: Tensor) -> Wait:
        return self.broadcast(bucket)

    def check(self) -> None:
        if self.store.check(["closed"]):
            raise RuntimeError(f"the trainer has given group {self.epoch} up")

    def close(self) -> None:
        if self.rank == 0:
            self.store.set("closed", "1")
