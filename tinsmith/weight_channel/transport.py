"""What every transport is: one end that sends buckets, and ends that receive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, cast, get_args

from torch import Tensor

from tinsmith.errors import InvalidRequest

Transport = Literal["gloo", "nccl", "shm", "cuda_ipc"]

TRANSPORTS = get_args(Transport)
COLLECTIVE = ("gloo", "nccl")
"""One process group with all its receivers."""
LOCAL = ("shm", "cuda_ipc")
"""Memory of the trainer that the receivers of its machine map."""
ON_CUDA = ("nccl", "cuda_ipc")
"""Buckets lie in GPU memory."""


Wait = Callable[[], None]
"""Blocks until a bucket is through; raises RuntimeError when the other end is lost, or sends another size."""


class Outlet(Protocol):
    """The trainer's end, for all receivers that have this transport."""

    def send(self, bucket: Tensor) -> Wait:
        """Begins to send a contiguous bucket in host memory; it must not change before the wait for it is over."""
        ...

    def close(self) -> None:
        """Gives the group up. Receivers that wait hear of it, at once where the transport can tell."""
        ...


class Inlet(Protocol):
    """A receiver's end. After an error it is of no use: the trainer forms the next group."""

    @property
    def epoch(self) -> int: ...

    @property
    def device(self) -> str:
        """Where the buckets that it fills lie: "cpu" or "cuda"."""
        ...

    def receive(self, bucket: Tensor) -> Wait:
        """Begins to fill it with the next bucket. Waits must be waited for in their order."""
        ...

    def check(self) -> None:
        """Raises RuntimeError when the trainer has given this group up, or is gone."""
        ...

    def close(self) -> None: ...


def parse_transport(name: str, *, field: str) -> Transport:
    if name not in TRANSPORTS:
        raise InvalidRequest(f"{field}: {name!r} is not one of {', '.join(TRANSPORTS)}", field=field)
    return cast(Transport, name)


def bucket_timeout_s(num_bytes: int) -> float:
    """Longest wait for one bucket: only a network that has stopped is slower. Processes that have are found sooner."""
    return 10.0 + num_bytes / 2**20
