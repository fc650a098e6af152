"""Tasks and pauses of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

GRACE_S = 2.0
"""Time that cancelled work of `to_its_end` has left to end by itself, in seconds."""


async def to_its_end(work: Coroutine[None, None, None]) -> None:
    """Awaits `work`. If the caller is cancelled, `work` still has GRACE_S to end, and is cancelled after that.

    The work is a query of a database. A cancelled query loses its connection, which is logged as an error, and the
    database may or may not have executed it. So the query must be one that can be repeated.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=GRACE_S)
        task.cancel()
        raise


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks, and returns once all of them have ended. Drops their results and errors."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits until the event is set, for `timeout_s` at most. Returns False after that time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


@dataclass(slots=True)
class Pause:
    """A pause between two attempts, which doubles with every use, up to `longest_s`."""

    next_s: float = 0.1
    longest_s: float = 2.0

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s)
        self.next_s = min(2 * self.next_s, self.longest_s)
