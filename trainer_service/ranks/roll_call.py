"""Which rank does not answer: a thread of each tells the others, through the store that joined them, how far it is.

A collective that times out says only that somebody is missing.
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
"""A rank that gives no sign for so long stands still."""
_STORE_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank tells of itself."""

    machine: str
    """Its process numbers mean something there only."""
    parent: int
    process: int
    beat: int
    step: int
    """How many waits for other ranks it has begun."""


@dataclass(frozen=True, slots=True)
class Absent:
    still: tuple[int, ...]
    """Ranks whose process is gone or stopped."""
    behind: tuple[int, ...]
    """Ranks that live, but have not come to where this one waits."""

    def __str__(self) -> str:
        said = [f"{_ranks(self.still)} did not answer: gone, or stopped"] if self.still else []
        said += [f"{_ranks(self.behind)} did not come to where this one waits"] if self.behind else []
        return "; ".join(said) or "another rank is lost"


class RollCall:
    """`step` counts this rank's waits for others; every rank makes the same ones in the same order."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        """Of the store it uses a connection of its own: nobody else's call keeps it waiting."""
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
            except RuntimeError as error:  # it ends with torchrun, and so does this process
                logger.debug("the store of the ranks does not answer: %s", error)
                return
            time.sleep(_BEAT_S)

    def absent(self) -> Absent:
        """Takes seconds. Stopped processes on this machine are ended: torchrun would wait for half a minute."""
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
    """What two looks at the signs, a while apart, tell rank `rank` of the others."""
    others = [other for other in range(world_size) if other != rank]
    still = tuple(o for o in others if o not in after or (o in before and before[o].beat == after[o].beat))
    step = after[rank].step if rank in after else 0
    return Absent(still, tuple(o for o in others if o not in still and after[o].step < step))


def _machine() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getppid()}"


def _ranks(numbers: tuple[int, ...]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
