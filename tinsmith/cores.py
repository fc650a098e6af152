"""A page of memory on which the services of one machine say which of them compute, so that one alone uses all cores.

Two OpenMP pools that share cores cost a factor of 2 to 4. So a service asks before each micro-batch or decode step how
many threads it may use: all, while no other service computes, and its share of the cores otherwise. The longest time in
which two services have more threads than there are cores is one micro-batch or decode step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

_HEADER = 1
"""Numbers before the places: how many cores there are."""
_SHARE, _PID = 0, 1
"""What a place holds: the cores of its service while all compute, and its process id while it computes, else 0."""


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def make_page(path: Path, *, cores: int, shares: Sequence[int]) -> None:
    """Writes a page with a place for each share, on which nobody computes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page = np.array([cores, *(number for share in shares for number in (share, 0))], np.int32)
    path.write_bytes(page.tobytes())


class Cores:
    """The place of one service on the page. Only one thread of the service may call it."""

    def __init__(
        self,
        address: str,
        *,
        most: int,
        set_threads: Callable[[int], None],
        processes: int = 1,
        announces: bool = True,
        fixed: bool = False,
    ) -> None:
        """`address`: PATH:PLACE, or empty, and then the number of threads never changes.
        `most`: threads that the service may use at most. 0 means all cores, and without a page torch's default.
        `set_threads`: called when the number of threads changes.
        `processes`: ranks of the service, which divide its threads.
        `announces`: False for a rank that computes only when rank 0 does.
        `fixed`: the number of threads never changes: it is `most`, or the service's share where that is 0.

        Raises ValueError where there is no such page or place.
        """
        self._most = most
        self._set_threads = set_threads
        self._processes = processes
        self._announces = announces
        self._fixed = fixed
        self._threads = 0
        self._page: np.ndarray | None = None
        if not address:
            if most:
                self._set(most)
            return
        path, _, place = address.rpartition(":")
        try:
            numbers = np.memmap(path, np.int32, "r+")
            self._cores, self._page = int(numbers[0]), numbers[_HEADER:].reshape(-1, 2)
            self._place = range(len(self._page))[int(place)]
        except (OSError, ValueError, IndexError) as error:
            raise ValueError(f"cores_page: {address!r} is no page with such a place ({error})") from None
        self.end()  # a process that was killed here while it computed has left its number
        # Others load at the same time.
        self._set(self._allowed() if fixed else max(1, self.share // processes))

    @property
    def threads(self) -> int:
        """Threads of this process now; 0 means torch's default."""
        return self._threads

    @property
    def share(self) -> int:
        """Threads of the service while all services compute; without a page `most`."""
        if self._page is None:
            return self._most
        share = int(self._page[self._place, _SHARE])
        return min(share, self._most) if self._most else share

    def begin(self) -> None:
        """Says that this service computes, until `end`, and takes as many threads as it may use now."""
        if self._page is None:
            return
        if self._announces:
            self._page[self._place, _PID] = os.getpid()
        if (allowed := self._allowed()) != self._threads:
            self._set(allowed)

    def end(self) -> None:
        """Says that this service waits for work."""
        if self._page is not None and self._announces:
            self._page[self._place, _PID] = 0

    def _allowed(self) -> int:
        assert self._page is not None
        if self._fixed:
            return max(1, (self._most or self.share) // self._processes)
        shares = [
            int(share)
            for number, (share, pid) in enumerate(self._page)
            if number == self._place or (pid and _is_alive(int(pid)))
        ]
        mine = int(self._page[self._place, _SHARE])
        allowed = self._cores * mine // sum(shares) if len(shares) > 1 else self._cores
        if self._most:
            allowed = min(allowed, self._most)
        return max(1, allowed // self._processes)

    def _set(self, threads: int) -> None:
        self._threads = threads
        self._set_threads(threads)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
