"""The thread on which large messages are read, beside the compute thread and the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tinsmith.cores import Cores
from tinsmith.threads import in_pool_of

T = TypeVar("T")

_LONGEST_PAUSE_S = 1.0


class Reader:
    """Reads one message at a time, because reading holds the interpreter's lock, for which the compute thread waits.

    While the compute thread is busy, a reading is followed by a pause of the same length, 1 s at most. Large messages
    that were read one right after the other would make each micro-batch take several times as long.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "reader")
        self._pause_ends_s = 0.0
        """By time.monotonic."""

    async def run(self, call: Callable[[], T], *, cores: Cores, is_busy: Callable[[], bool]) -> T:
        """The result of `call`, run on the thread in its turn. `is_busy`: whether the compute thread computes now."""
        return await in_pool_of(self._pool, self._run, call, cores, is_busy)

    def _run(self, call: Callable[[], T], cores: Cores, is_busy: Callable[[], bool]) -> T:
        if is_busy():
            time.sleep(max(0.0, self._pause_ends_s - time.monotonic()))
        began_s = time.monotonic()
        try:
            with cores.reading():
                return call()
        finally:
            ended_s = time.monotonic()
            self._pause_ends_s = ended_s + min(ended_s - began_s, _LONGEST_PAUSE_S)
