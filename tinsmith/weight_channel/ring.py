"""Transports shm and cuda_ipc: a ring of slots in the trainer's memory, which the samplers of its machine map.

The trainer writes bucket n to slot n % num_slots, and reuses a slot once every receiver has read it. One Unix socket
for each receiver tells the receiver which buckets are there, and the trainer which have been read. The socket has an
abstract name, so no file exists. Host memory is a memfd that is sent over the socket, so it has no name at all. The
kernel frees both with the last process that holds them, however that process ends, and wakes a process that waits for
one that died.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Self

import torch
from torch import Tensor

from tinsmith.weight_channel.ring_memory import RingMemory
from tinsmith.weight_channel.transport import Wait, bucket_timeout_s

AVAILABLE = sys.platform == "linux"
"""Whether these transports can be used: memfd, abstract sockets and SO_PEERCRED exist on Linux only."""

NUM_SLOTS = 4
"""Number of slots of a ring."""

_NAME_PREFIX = "tinsmith-weights-"
_BUCKET = struct.Struct("<QQ")  # number of the bucket since the ring was made; its bytes
_TAKEN = struct.Struct("<Q")  # number of buckets that this receiver has read
_PEER = struct.Struct("iII")  # struct ucred: pid, uid, gid
_CONNECT_S = 5.0


class RingListener:
    """The socket at which the trainer waits for one receiver. A context manager that closes the socket."""

    def __init__(self) -> None:
        self.name = _NAME_PREFIX + secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(1)
        self._socket.setblocking(False)

    def accept(self) -> socket.socket:
        """The receiver's connection. Raises RuntimeError if there is none, or if it is that of another user."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            raise RuntimeError(f"no receiver has connected: {error}") from error
        _check_user(connection)
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()


def connect_ring(name: str) -> socket.socket:
    """A receiver's connection to the trainer. Raises RuntimeError if no trainer listens in this machine's network
    namespace, or if the trainer runs as another user."""
    if not AVAILABLE or not name.startswith(_NAME_PREFIX):
        raise RuntimeError(f"{name!r} is no socket of a trainer on this machine")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_CONNECT_S)
    try:
        connection.connect(f"\0{name}")
    except OSError as error:
        connection.close()
        raise RuntimeError(f"no trainer listens at {name!r} on this machine: {error}") from error
    _check_user(connection)
    return connection


def _check_user(connection: socket.socket) -> None:
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.geteuid():
        connection.close()
        raise RuntimeError(f"the other end belongs to user {uid}, this process to user {os.geteuid()}")


class RingOutlet:
    """The trainer's end of a ring, with all its receivers."""

    def __init__(self, memory: RingMemory, receivers: Sequence[socket.socket]) -> None:
        self.memory = memory
        self._receivers = receivers
        self._ending = weakref.finalize(self, _end, *receivers)  # closes the ring if nothing refers to it any more
        self._num_taken = [0] * len(receivers)
        self._num_sent = 0

    def send(self, bucket: Tensor) -> Wait:
        if bucket.nbytes > self.memory.slot_bytes:
            raise RuntimeError(f"a bucket of {bucket.nbytes} bytes is larger than a slot of {self.memory.slot_bytes}")
        timeout_s = bucket_timeout_s(bucket.nbytes)
        self._wait_taken(self._num_sent + 1 - self.memory.num_slots, timeout_s)
        slot = self.memory.slot(self._num_sent)[: bucket.nbytes].view(bucket.dtype)
        slot.copy_(bucket)
        _settle(slot)
        message = _BUCKET.pack(self._num_sent, bucket.nbytes)
        for receiver in self._receivers:
            _send(receiver, message, timeout_s)
        self._num_sent += 1
        return _nothing_to_wait_for

    def _wait_taken(self, count: int, timeout_s: float) -> None:
        for n, receiver in enumerate(self._receivers):
            while self._num_taken[n] < count:
                (self._num_taken[n],) = _TAKEN.unpack(_receive(receiver, _TAKEN.size, timeout_s))

    def close(self) -> None:
        self._ending()


class RingInlet:
    """A receiver's end of a ring."""

    def __init__(self, memory: RingMemory, trainer: socket.socket, *, epoch: int) -> None:
        self.epoch = epoch
        self._memory = memory
        self._trainer = trainer
        self._ending = weakref.finalize(self, _end, trainer)
        self._num_received = 0

    @property
    def device(self) -> str:
        return self._memory.device

    def receive(self, bucket: Tensor) -> Wait:
        return partial(self._receive, bucket)

    def _receive(self, bucket: Tensor) -> None:
        timeout_s = bucket_timeout_s(bucket.nbytes)
        number, num_bytes = _BUCKET.unpack(_receive(self._trainer, _BUCKET.size, timeout_s))
        if (number, num_bytes) != (self._num_received, bucket.nbytes) or num_bytes > self._memory.slot_bytes:
            raise RuntimeError(
                f"bucket {number} of {num_bytes} bytes came, instead of bucket {self._num_received} of {bucket.nbytes} "
                f"in slots of {self._memory.slot_bytes}"
            )
        bucket.copy_(self._memory.slot(number)[:num_bytes].view(bucket.dtype))
        _settle(bucket)
        self._num_received += 1
        _send(self._trainer, _TAKEN.pack(self._num_received), timeout_s)

    def check(self) -> None:
        try:
            self._trainer.setblocking(False)
            data = self._trainer.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:  # the trainer closed the socket before it had read everything
            data = b""
        if not data:
            raise RuntimeError(f"the trainer has given group {self.epoch} up, or is gone")

    def close(self) -> None:
        self._ending()


def _nothing_to_wait_for() -> None: ...


def _settle(tensor: Tensor) -> None:
    """Waits until a copy on a GPU is done, because the other end is notified of it next."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _send(peer: socket.socket, message: bytes, timeout_s: float) -> None:
    try:
        peer.settimeout(timeout_s)
        peer.send(message)
    except OSError as error:
        raise RuntimeError(f"the other end of the ring is lost: {error}") from error


def _receive(peer: socket.socket, size: int, timeout_s: float) -> bytes:
    try:
        peer.settimeout(timeout_s)
        message = peer.recv(size + 1)
    except OSError as error:
        raise RuntimeError(f"the other end of the ring is lost: {error}") from error
    if len(message) != size:
        raise RuntimeError("the other end of the ring has closed it" if not message else "no message of a ring")
    return message


def _end(*peers: socket.socket) -> None:
    """Closes the sockets. `shutdown` wakes a thread that waits for one; `close` alone would not."""
    for peer in peers:
        with suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)
        peer.close()
