"""A page of memory on which the services of one machine say which of them compute, so that one alone uses all cores.

Two OpenMP pools that share cores cost a factor of 2 to 4. So a service asks before each micro-batch or decode step how
many threads it may use: all, while no other service computes, and its share of the cores otherwise. The longest time in
which two services have more threads than there are cores is one micro-batch or decode step.

Few tokens have fewer threads: what a second one saves is less than what it costs as soon as anything else, such as the
gateway or the client, needs its core.

A service that reads a large body says so, too, and nobody else takes the core that this needs: a pass takes 3 to 10
times as long when its threads wait for one that has no core.
"""

from __future__ import annotations

import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

SWITCH_S = 1e-4
"""For sys.setswitchinterval, in every service. Torch gives the interpreter's lock back in each operation, and an event
loop whenever it looks for news. While another thread computes in Python they wait so long until they have the lock
again, some hundred times in each micro-batch; Python's default is 5 ms."""

_NICER = 5
"""A thread of this niceness gets a quarter of a core that one of 0 wants all the time."""

_HEADER = 1
"""Numbers before the places: how many cores there are."""
_SHARE, _PID, _READER, _PLACE = 0, 1, 2, 3
"""What a place of three numbers holds: the cores of its service while all compute, and its process id twice, while it
computes and while it reads a large body, else 0."""


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def yield_to_event_loops() -> None:
    """Lowers the priority of this thread, and of those that it starts, below that of the event loops of all services: a
    loop that is ready gets a core at once, and needs it for a moment. Nothing happens where threads have none."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


def make_page(path: Path, *, cores: int, shares: Sequence[int]) -> None:
    """Writes a page with a place for each share, on which nobody computes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(array("i", [cores, *(number for share in shares for number in (share, 0, 0))]).tobytes())


class Cores:
    """The place of one service on the page. Only one thread of the service may call `begin` and `end`, and one
    `reading`."""

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
        self.tokens_per_thread = 1
        """A pass of fewer tokens for each thread has fewer threads; known once the model is loaded."""
        self._threads = 0
        self._page: memoryview | None = None
        if not address:
            if most:
                self._set(most)
            return
        path, _, place = address.rpartition(":")
        try:
            with open(path, "r+b") as file:
                page = memoryview(mmap(file.fileno(), 0)).cast("i")
            self._cores = page[0]
            self._places = range(_HEADER, len(page), _PLACE)
            self._place = dict(enumerate(self._places))[int(place)]
            self._page = page
        except (OSError, ValueError, LookupError) as error:
            raise ValueError(f"cores_page: {address!r} is no page with such a place ({error})") from None
        # A process that was killed here has left its number.
        self.end()
        if announces:
            self._page[self._place + _READER] = 0
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
        share = self._page[self._place + _SHARE]
        return min(share, self._most) if self._most else share

    def __str__(self) -> str:
        """For a log line."""
        if self._page is None or self._fixed:
            return f"{self._threads or 'a default number of'} threads, always"
        most = max(1, min(self._most or self._cores, self._cores) // self._processes)
        return f"up to {most} threads, and {max(1, self.share // self._processes)} while all services compute"

    def begin(self, *, num_tokens: int | None = None, is_shared: bool = False) -> None:
        """Says that this service computes, until `end`, and takes as many threads as it may use now.

        `num_tokens`: of the pass that begins; None for what is no pass. `is_shared`: the other services will compute at
        the same time.
        """
        if self._page is None:
            return
        if self._announces:
            self._page[self._place + _PID] = os.getpid()
        allowed = self._allowed()
        if is_shared and not self._fixed:
            allowed = min(allowed, max(1, self.share // self._processes))
        if num_tokens is not None and not self._fixed:
            allowed = min(allowed, max(1, num_tokens // self.tokens_per_thread))
        if allowed != self._threads:
            self._set(allowed)

    def end(self) -> None:
        """Says that this service waits for work."""
        if self._page is not None and self._announces:
            self._page[self._place + _PID] = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Takes a core from all that compute, this service included, from their next pass on."""
        if self._page is None:
            yield
            return
        self._page[self._place + _READER] = os.getpid()
        try:
            yield
        finally:
            self._page[self._place + _READER] = 0

    def _allowed(self) -> int:
        assert self._page is not None
        if self._fixed:
            return max(1, (self._most or self.share) // self._processes)
        mine = self._page[self._place + _SHARE]
        others = sum(self._page[place + _SHARE] for place in self._places if self._computes(place))
        cores = self._cores - sum(_is_alive(self._page[place + _READER]) for place in self._places)
        allowed = cores * mine // (mine + others) if others else cores
        if self._most:
            allowed = min(allowed, self._most)
        return max(1, allowed // self._processes)

    def _computes(self, place: int) -> bool:
        """Whether the service of another place does."""
        assert self._page is not None
        return place != self._place and _is_alive(self._page[place + _PID])

    def _set(self, threads: int) -> None:
        self._threads = threads
        self._set_threads(threads)


def _is_alive(pid: int) -> bool:
    """False for 0."""
    if pid == 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
