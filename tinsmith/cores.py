"""A page of shared memory on which each service of a machine records whether it computes, so that one service that
computes alone uses all cores.

Two OpenMP pools that share cores make each other 2 to 4 times slower. Before each micro-batch or decode step a service
therefore reads from the page how many threads it may use: all of them while no other service computes, otherwise its
share of the cores. Two services together have more threads than cores for one micro-batch or decode step at most.

A pass of few tokens uses fewer threads. A second thread would save little there, and would cost more than it saves as
soon as another process, such as the gateway or the client, needs its core.

A service that reads a large request body also records this, and the computing services leave one core free for it.
Without that core, the threads of a pass would wait for the one thread whose core is taken, and the pass would take 3 to
10 times as long. A body is read in steps, by the gateway and then by the trainer, so the core stays free for a moment
after each step. Otherwise a pass that begins between two steps would use it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from mmap import mmap
from pathlib import Path

SWITCH_S = 1e-4
"""Every service passes this to sys.setswitchinterval. Torch releases the GIL in each operation, and an event loop in
each poll. If another thread runs Python code meanwhile, they wait for this interval before they get the GIL back, which
happens some hundred times in each micro-batch. Python's default is 5 ms."""

SPINS = "2000"
"""Value of GOMP_SPINCOUNT: number of rounds that a thread of GNU's OpenMP library, which torch uses, spins for work
before it sleeps. A pass has hundreds of operations, and waking a thread takes as long as a short operation. Measured
with two threads on `small`, without and with spinning: 70 ms and 25 ms for 8 tokens, 2.9 s and 2.0 s for 4,096 tokens.
Beside a process that takes one of the two cores, spinning costs a twentieth of a pass of 1,024 tokens."""

_NICER = 1
"""Lowers a compute thread's priority by the smallest step. With 5, it got a third of the time that each other busy
thread of its service got, and a micro-batch of 60 ms of processor time took 0.4 s beside a thousand requests."""

_HEADER = 1
"""Length of the page's header, which holds the number of cores."""
_SHARE, _PID, _READER, _PLACE = 0, 1, 2, 3
"""The header is followed by one place of three numbers (`_PLACE`) for each service. The numbers are the cores that the
service may use while all services compute; its process id while it computes, else 0; and the time until which it has a
core for reading a large body, in tenths of a second by time.monotonic."""
_LONGEST_READING_S = 5.0
"""A step of reading a body has its core for at most this long, so that a service which dies meanwhile frees it."""
_BETWEEN_STEPS_S = 0.2
"""A core stays free for this long after a long step of reading a body, because the next step may follow."""
_LONG_STEP_S = 0.02
"""A reading step of at least this many seconds is long. A body of 1 MB is read in shorter steps. If a core stayed free
after these too, the pass of such a batch would lack the core for a tenth of its time."""


def usable_cores() -> int:
    """Number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def yield_to_event_loops() -> None:
    """Lowers the priority of this thread, and of the threads that it starts, below that of every service's event loop.
    An event loop that is ready then goes first; it needs a core only for a moment. Does nothing on systems whose
    threads have no priority of their own, or that forbid to change it, as systemd's filter ~@resources does. Where
    Linux divides the cores among sessions (sched_autogroup_enabled), priorities count among the threads of one service
    only."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


def make_page(path: Path, *, cores: int, shares: Sequence[int]) -> None:
    """Writes a page with one place for each share, on which no service computes.

    `cores`: number of cores of the machine. `shares`: cores of each service while all services compute.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(array("i", [cores, *(number for share in shares for number in (share, 0, 0))]).tobytes())


class Cores:
    """One service's place on the page. Only one thread of the service may call `begin` and `end`, and only one may call
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
        """`address`: PATH:PLACE of the page. Without an address the number of threads never changes.
        `most`: the most threads that the service may use. 0 means all cores, or torch's default without a page.
        `set_threads`: called when the number of threads changes.
        `processes`: number of the service's ranks, which divide its threads among them.
        `announces`: False for a rank that computes only when rank 0 does, which writes to the page for both.
        `fixed`: the number of threads never changes. It is `most`, or the service's share if `most` is 0.

        Raises ValueError if there is no such page or place.
        """
        self._most = most
        self._set_threads = set_threads
        self._processes = processes
        self._announces = announces
        self._fixed = fixed
        self.tokens_per_thread = 1
        """Each thread of a pass gets at least this many tokens: a pass of fewer tokens uses fewer threads. The service
        sets it once the model is loaded."""
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
        # An earlier process of this service may have been killed while its id was on the page.
        self.end()
        if announces:
            self._page[self._place + _READER] = 0
        # The other services load their models at the same time, so this one begins with its share.
        self._set(self._allowed() if fixed else max(1, self.share // processes))

    @property
    def threads(self) -> int:
        """Threads of this process now; 0 means torch's default."""
        return self._threads

    @property
    def share(self) -> int:
        """Threads of the service while all services compute; `most` without a page."""
        if self._page is None:
            return self._most
        share = self._page[self._place + _SHARE]
        return min(share, self._most) if self._most else share

    def __str__(self) -> str:
        """The number of threads, for a log line."""
        if self._page is None or self._fixed:
            return f"{self._threads or 'a default number of'} threads, always"
        most = max(1, min(self._most or self._cores, self._cores) // self._processes)
        return f"up to {most} threads, and {max(1, self.share // self._processes)} while all services compute"

    def begin(self, *, num_tokens: int | None = None, is_shared: bool = False) -> None:
        """Records that this service computes, until `end`, and sets as many threads as it may use now.

        `num_tokens`: tokens of the pass that begins; None for other work. `is_shared`: the other services will compute
        at the same time.
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
        """Records that this service no longer computes."""
        if self._page is not None and self._announces:
            self._page[self._place + _PID] = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reserves a core for the block, and for a moment after a long one. All services that compute, this one
        included, leave it free from their next pass on."""
        if self._page is None:
            yield
            return
        began = time.monotonic()
        self._page[self._place + _READER] = _tenths_in(_LONGEST_READING_S)
        try:
            yield
        finally:
            is_long = time.monotonic() - began >= _LONG_STEP_S
            self._page[self._place + _READER] = _tenths_in(_BETWEEN_STEPS_S) if is_long else 0

    def _allowed(self) -> int:
        assert self._page is not None
        if self._fixed:
            return max(1, (self._most or self.share) // self._processes)
        mine = self._page[self._place + _SHARE]
        others = sum(self._page[place + _SHARE] for place in self._places if self._computes(place))
        now = _tenths_in(0)
        cores = self._cores - sum(self._page[place + _READER] > now for place in self._places)
        allowed = cores * mine // (mine + others) if others else cores
        if self._most:
            allowed = min(allowed, self._most)
        return max(1, allowed // self._processes)

    def _computes(self, place: int) -> bool:
        """Whether `place` belongs to another service, and that service computes now."""
        assert self._page is not None
        return place != self._place and _is_alive(self._page[place + _PID])

    def _set(self, threads: int) -> None:
        self._threads = threads
        self._set_threads(threads)


def _tenths_in(seconds: float) -> int:
    """The time `seconds` from now, in tenths of a second by time.monotonic, which is how the page stores times."""
    return int(10 * (time.monotonic() + seconds))


def _is_alive(pid: int) -> bool:
    """Whether a process with this id runs. False for 0, which stands for no process."""
    if pid == 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as another user
        return True
    return True
