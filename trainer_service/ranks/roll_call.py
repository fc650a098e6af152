"""Finds which rank does not answer. A collective that times out says only that some rank is missing.

A thread of each rank writes signs of life to the store through which the ranks have joined.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

logger = logging.getLogger(__name__)

_BEAT_S = 0.5
_CALL_S = 5 * _BEAT_S
"""A rank without a new sign of life for this long counts as stopped, in seconds."""
_STORE_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Sign:
    """A rank's sign of life."""

    machine: str
    """Machine and PID namespace, within which the process ids are valid."""
    parent: int
    """Process id of its torchrun."""
    process: int
    """Process id of the rank."""
    beat: int
    """Number of signs that the rank has given."""
    step: int
    """Number of waits for other ranks that the rank has begun."""


@dataclass(frozen=True, slots=True)
class Absent:
    """The ranks that this rank waits for in vain."""

    still: tuple[int, ...]
    """Ranks whose process is gone or stopped."""
    behind: tuple[int, ...]
    """Live ranks that have begun fewer waits than this rank."""

    def __str__(self) -> str:
        said = [f"{_ranks(self.still)} did not answer: gone, or stopped"] if self.still else []
        said += [f"{_ranks(self.behind)} did not reach the point where this rank waits"] if self.behind else []
        return "; ".join(said) or "another rank is lost"


class RollCall:
    """Gives this rank's signs of life and reads those of the others.

    `step` counts this rank's waits for others. Every rank makes the same waits in the same order.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        """Opens its own connection to the store, so that no other call delays the signs of life."""
        connection = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        connection.set_timeout(_STORE_TIMEOUT)
        self._store = dist.PrefixStore("roll-call", connection)
        self._rank = rank
        self._world_size = world_size
        self._machine = _machine()
        self.step = 0

    def start(self) -> None:
        threading.Thread(target=self._beat, name="roll-call", daemon=True).start()

    def _beat(self) -> None:
        beat = 0
        while True:
            beat += 1
            sign = [self._machine, os.getppid(), os.getpid(), beat, self.step]
            try:
                self._store.set(str(self._rank), json.dumps(sign))
            except RuntimeError as error:  # the store ends with torchrun, and so does this process
                logger.debug("the store of the ranks does not answer: %s", error)
                return
            time.sleep(_BEAT_S)

    def absent(self) -> Absent:
        """Finds the absent ranks, which takes some seconds.

        Kills stopped ranks of the same torchrun, which would wait for them for half a minute.
        """
        try:
            before = self._signs()
            time.sleep(_CALL_S)
            after = self._signs()
        except RuntimeError as error:
            logger.debug("the store of the ranks does not answer: %s", error)
            return Absent((), ())
        absent = missing(before, after, rank=self._rank, world_size=self._world_size)
        mine = self._machine, os.getppid()
        for sign in (after[rank] for rank in absent.still if rank in after):
            if (sign.machine, sign.parent) == mine:
                try:
                    os.kill(sign.process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        return absent

    def _signs(self) -> Mapping[int, Sign]:
        known = [rank for rank in range(self._world_size) if self._store.check([str(rank)])]
        return {rank: Sign(*json.loads(self._store.get(str(rank)))) for rank in known}


def missing(before: Mapping[int, Sign], after: Mapping[int, Sign], *, rank: int, world_size: int) -> Absent:
    """The ranks that are absent for `rank`, by two readings of the signs, `before` and _CALL_S seconds `after`."""
    others = [other for other in range(world_size) if other != rank]
    still = tuple(o for o in others if o not in after or (o in before and before[o].beat == after[o].beat))
    step = after[rank].step if rank in after else 0
    return Absent(still, tuple(o for o in others if o not in still and after[o].step < step))


def _machine() -> str:
    """Host name and PID namespace; without /proc, host name and the parent's process id."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getppid()}"


def _ranks(numbers: tuple[int, ...]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
