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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch.distributed as dist

logger = logging.getLogger(__name__)

_BEAT_S = 0.5
_CALL_S = 5 * _BEAT_S
"""A rank without a new sign of life for this long counts as stopped, in seconds."""
_STORE_TIMEOUT = timedelta(seconds=5)
_LOOKS = 10
"""How often a rank reads the others' signs of life in the time after which one without a new sign is lost."""


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

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, longest_s: float) -> None:
        """Opens its own connection to the store, so that no other call delays the signs of life.

        `longest_s`: a rank that gives no new sign of life for this many seconds is lost, also while others wait for it
        without a limit: between commands, and while the base model is loaded.
        """
        connection = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        connection.set_timeout(_STORE_TIMEOUT)
        self._store = dist.PrefixStore("roll-call", connection)
        self._rank = rank
        self._world_size = world_size
        self._longest_s = longest_s
        self._machine = _machine()
        self._heard: dict[int, tuple[int, float]] = {}
        """Rank -> the newest beat that is known of it, and when this beat was first read, by time.monotonic."""
        self._read_s = 0.0
        """When the signs of the others were last read, by time.monotonic."""
        self._answered_s = 0.0
        """When the store last answered, by time.monotonic."""
        self.step = 0

    def start(self, end: Callable[[str], object]) -> None:
        """Begins to give signs of life. `end` is called, in a thread, with the reason for which this process has to
        end, because a rank or the store is lost."""
        threading.Thread(target=self._beat, args=(end,), name="roll-call", daemon=True).start()

    def _beat(self, end: Callable[[str], object]) -> None:
        self._read_s = self._answered_s = time.monotonic()
        for beat in count(1):
            lost: tuple[int, ...] = ()
            try:
                self._give_sign(beat)
                lost = self._newly_lost()
                self._answered_s = time.monotonic()
            except RuntimeError as error:  # torchrun may have ended, which then ends this process
                logger.debug("the store of the ranks does not answer: %s", error)
                time.sleep(_CALL_S)
            if reason := self._reason_to_end(lost):
                end(reason)
                return
            time.sleep(_BEAT_S)

    def _give_sign(self, beat: int) -> None:
        sign = [self._machine, os.getppid(), os.getpid(), beat, self.step]
        self._store.set(str(self._rank), json.dumps(sign))

    def _newly_lost(self) -> tuple[int, ...]:
        """The lost ranks; none while the last reading of the signs is younger than `longest_s` / _LOOKS."""
        if time.monotonic() - self._read_s < self._longest_s / _LOOKS:
            return ()
        lost = self._lost()
        self._read_s = time.monotonic()
        return lost

    def _reason_to_end(self, lost: tuple[int, ...]) -> str:
        """The reason for which this process has to end; empty if it may go on."""
        limit = f"{self._longest_s:g} s (twice --rank-timeout-s)"
        if lost:
            return f"{_ranks(lost)} gave no sign of life for {limit}"
        if time.monotonic() - self._answered_s > self._longest_s:
            return f"the store of the ranks has not answered for {limit}"
        return ""

    def _lost(self) -> tuple[int, ...]:
        """The ranks that have given no new sign of life for `longest_s`."""
        now = time.monotonic()
        for rank, sign in self._signs().items():
            if rank not in self._heard or self._heard[rank][0] != sign.beat:
                self._heard[rank] = sign.beat, now
        return tuple(rank for rank, (_, since) in self._heard.items() if now - since > self._longest_s)

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
