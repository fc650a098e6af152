"""Work that may be cancelled at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

GRACE_S = 2.0


async def to_its_end(work: Coroutine[None, None, None]) -> None:
    """Does the work. When this is cancelled, the work still has GRACE_S, and is cut off then: a query that is cut off
    costs its connection, and an error in the log. Nobody knows whether the database has done it all the same, so only
    what may be done again is to be done by this."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=GRACE_S)
        task.cancel()
        raise
