"""The interface of every transport: one end that sends buckets, and ends that receive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, cast, get_args

from torch import Tensor

from tinsmith.errors import InvalidRequest

Transport = Literal["gloo", "nccl", "shm", "cuda_ipc"]

TRANSPORTS = get_args(Transport)
COLLECTIVE = ("gloo", "nccl")
"""Transports that use a process group of the trainer and its receivers."""
LOCAL = ("shm", "cuda_ipc")
"""Transports that use memory of the trainer, which receivers on the trainer's machine map."""
ON_CUDA = ("nccl", "cuda_ipc")
"""Transports whose buckets lie in GPU memory."""


Wait = Callable[[], None]
"""Blocks until a bucket has been transferred. Raises RuntimeError if the other end is lost, or sends a bucket of
another size."""


class Outlet(Protocol):
    """The trainer's end, for all receivers of this transport."""

    def send(self, bucket: Tensor) -> Wait:
        """Begins to send a contiguous bucket in host memory. The bucket must not change until its Wait has returned."""
        ...

    def close(self) -> None:
        """Gives up the group. Receivers that wait fail, at once if the transport can tell them."""
        ...


class Inlet(Protocol):
    """A receiver's end. It cannot be used after an error; the trainer forms the next group."""

    @property
    def epoch(self) -> int: ...

    @property
    def device(self) -> str:
        """Device of the buckets that `receive` fills: "cpu" or "cuda"."""
        ...

    def receive(self, bucket: Tensor) -> Wait:
        """Begins to receive the next bucket into `bucket`. Waits must be called in the order in which they were
        made."""
        ...

    def check(self) -> None:
        """Raises RuntimeError if the trainer has given up this group, or has ended."""
        ...

    def close(self) -> None: ...


def parse_transport(name: str, *, field: str) -> Transport:
    """The transport of this name. Raises InvalidRequest, naming `field`, for an unknown name."""
    if name not in TRANSPORTS:
        raise InvalidRequest(f"{field}: {name!r} is not one of {', '.join(TRANSPORTS)}", field=field)
    return cast(Transport, name)


def bucket_timeout_s(num_bytes: int) -> float:
    """Longest wait for one bucket, in seconds: 10 s and 1 s for each MiB. Only a network that has stopped takes longer;
    a process that has ended is noticed sooner."""
    return 10.0 + num_bytes / 2**20
