"""Waiting for what nothing announces. A test that has an event to wait for waits for the event."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def until(holds: Callable[[], Any], *, limit_s: float = 60.0) -> None:
    """Returns when `holds`, a function or a coroutine function, gives something true; TimeoutError after the limit."""
    async with asyncio.timeout(limit_s):
        while True:
            found = holds()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.01)


def wait_until(holds: Callable[[], Any], *, what: str, limit_s: float = 60.0) -> float:
    """`until` for tests without an event loop. Returns the seconds that it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < limit_s, f"not after {limit_s:g} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began
