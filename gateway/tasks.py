"""Background work that gets time to finish when it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

GRACE_S = 2.0


async def to_its_end(work: Coroutine[None, None, None]) -> None:
    """Does the work. After a cancellation the work has GRACE_S to end, and is cancelled then.

    A query that is cancelled loses its connection and logs an error, and the database may have done it or not. So the
    work must bear being done again.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=GRACE_S)
        task.cancel()
        raise
