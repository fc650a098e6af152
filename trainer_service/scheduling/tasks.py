"""Tasks of the event loop that must have ended before the trainer ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self.is_closing = False
        """True once the trainer ends: from then on no task begins or repeats anything."""

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """The tasks that have not ended."""
        return iter(self._running)

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self, *, until_s: float, died: asyncio.Event) -> bool:
        """Waits for the tasks, and cancels those that have not ended by `until_s`, by time.monotonic, or when `died` is
        set. Returns False if there were any."""
        while self._running and time.monotonic() < until_s and not died.is_set():
            await asyncio.wait(self._running, timeout=until_s - time.monotonic())
        for task in self._running:
            task.cancel()
        return not self._running
