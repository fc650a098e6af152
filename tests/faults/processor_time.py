"""For how long threads of other processes compute, in processor time, on which a busy machine has no influence."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_S = 0.1
"""Between two looks at the clocks of all threads."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Clocks = dict[str, float]
"""Folder of a thread in /proc -> seconds for which it has computed."""


def clocks(pids: Sequence[int]) -> Clocks:
    """Processor time of all threads of these processes, as far as they are there."""
    found: Clocks = {}
    for pid in pids:
        with suppress(OSError):  # the process, or one of its threads, has ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                found[str(thread)] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return found


class ProcessorTime:
    """Reads the clocks of some processes' threads while it is `watching`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._moments: list[float] = []
        self._clocks: list[Clocks] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        while True:
            over = ended.wait(LOOK_S)
            self._moments.append(time.monotonic())
            self._clocks.append(clocks(self._pids))
            if over:
                return

    def busiest(self, began: float, ended: float) -> float:
        """For how long the thread that computed most did so between two moments of the monotonic clock: from the last
        look before the one to the first look after the other, as far as it was watched."""
        first = max(0, bisect_right(self._moments, began) - 1)
        last = min(len(self._moments) - 1, bisect_right(self._moments, ended))
        before = self._clocks[first]
        return max(spent - before.get(thread, 0.0) for thread, spent in self._clocks[last].items())
