"""A bound on the memory of request bodies, for all clients together.

A body counts from its first byte until its request is answered. For a training operation that is when the trainer has
it in its journal. The body of a sample counts until the sample is done, because it may have to be sent again. Small
bodies do not count, so that heartbeats and polls get through when large bodies fill the bound.
"""

from __future__ import annotations

from prometheus_client import Gauge

from tinsmith.errors import OutOfCapacity

SMALL_BYTES = 64 * 2**10


class Bodies:
    """Counts the bytes of request bodies in memory."""

    def __init__(self, max_bytes: int, gauge: Gauge) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._gauge = gauge

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._gauge.set(self.num_bytes)


class Share:
    """The share of one request in `Bodies`."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0
        self._num_counted = 0

    def take(self, num_bytes: int) -> None:
        """Adds bytes to the share. Raises OutOfCapacity, and releases the share, when all shares would exceed the
        bound."""
        self._num_bytes += num_bytes
        if self._num_bytes <= SMALL_BYTES:
            return
        more = self._num_bytes - self._num_counted
        if self._bodies.num_bytes + more > self._bodies.max_bytes:
            self.release()
            raise OutOfCapacity(
                f"request bodies of {self._bodies.num_bytes} bytes are in work, and this one would exceed "
                f"max_held_body_bytes, {self._bodies.max_bytes}; try again"
            )
        self._bodies.add(more)
        self._num_counted = self._num_bytes

    def release(self) -> None:
        self._bodies.add(-self._num_counted)
        self._num_bytes = self._num_counted = 0
