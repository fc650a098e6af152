"""Transports gloo and nccl: a process group of one trainer (rank 0) and its samplers.

The group is independent of torch.distributed's default group, which belongs to data or tensor parallelism.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tinsmith.weight_channel.transport import Wait, bucket_timeout_s

Backend = Literal["gloo", "nccl"]

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable that torch reads when it makes a process group. It is set only while the groups of this module
are made, so other groups, such as that of the trainer's ranks, keep torch's default."""
_setting_blocking_wait = threading.Lock()


def open_store(host: str, *, timeout_s: float) -> dist.TCPStore:
    """The trainer's rendezvous store, on a port that the kernel chooses (`store.port`). It outlives the groups.

    The store has no access control, so it listens on `host` only; by default torch would listen on all addresses.
    Raises RuntimeError if `host` is not an address of this machine.
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
    """A sampler's connection to the trainer's store. Raises RuntimeError if the trainer cannot be reached."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """One epoch of the channel: an Outlet on rank 0, an Inlet elsewhere."""

    process_group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    store: dist.Store
    """The part of the trainer's store that belongs to this epoch."""
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
        """Blocks until all ranks have joined. Raises RuntimeError after `timeout_s` seconds.

        `host`: address under which the other ranks reach this process (gloo).
        """
        prefix = dist.PrefixStore(f"weights/{epoch}/{backend}", store)
        timeout = timedelta(seconds=timeout_s)
        if backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            with _no_watchdog():
                group = dist.ProcessGroupNCCL(prefix, rank, world_size, nccl)
            return cls(group, prefix, rank, world_size, epoch, "cuda")
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        group = dist.ProcessGroupGloo(prefix, rank, world_size, options)
        return cls(group, prefix, rank, world_size, epoch, "cpu")

    def broadcast(self, tensor: Tensor) -> Wait:
        """Begins to copy rank 0's tensor into `tensor` of all other ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        timeout = timedelta(seconds=bucket_timeout_s(tensor.nbytes))
        options.timeout = timeout
        group: Any = self.process_group  # the stubs lack the overload with options
        work = group.broadcast([tensor], options)

        def wait() -> None:
            if not tensor.is_cuda:
                work.wait()
                return
            work.wait(timeout)  # NCCL ignores the timeout in `options`; without this one it takes the group's
            torch.cuda.current_stream(tensor.device).synchronize()

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
        if self.device == "cuda":
            # Without abort, the destructor would wait for a broadcast that never ends. abort can be slow, so a thread
            # calls it.
            threading.Thread(target=self._abort, name="nccl-abort", daemon=True).start()

    def _abort(self) -> None:
        group: Any = self.process_group
        with suppress(RuntimeError):  # the group is not used any more
            group.abort()


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """An NCCL process group that is made in this block raises errors and timeouts of a broadcast where the broadcast is
    waited for. By default a watchdog thread of torch would end the whole process, and all training in it, because one
    sampler has died."""
    with _setting_blocking_wait:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            del os.environ[_BLOCKING_WAIT]
            if before is not None:
                os.environ[_BLOCKING_WAIT] = before
