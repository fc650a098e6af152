"""Computes the prompt of one request while the engine computes nothing else, so that a death of the sampler has one
cause.

Other requests keep what they have in the cache and wait meanwhile. Between steps the engine is held twice: until the
caller has been told that the prompt is next, and until the caller has the first token. So whatever kills the sampler
between these two messages is the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 10.0
"""Longest time for which others wait for a prompt, in seconds. The rest of a longer prompt is computed beside them."""
GRACE_S = 5.0
"""Time that the caller then has to read that its trial is over, in seconds."""


class Trial:
    """The trial of one request. Belongs to the event loop."""

    def __init__(self, *, begin: Callable[[], None], end: Callable[[], None], expire: Callable[[], None]) -> None:
        """`begin` lets the engine compute the prompt, and `end` everything else. `expire` sends the caller an empty
        piece of the answer."""
        self._begin = begin
        self._ends = [end]
        self._expire = expire
        self._granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._is_over = False

    async def granted(self) -> bool:
        """Waits until the engine computes nothing. False: the request has ended before."""
        return await self._granted

    def begin(self) -> None:
        """The caller has been told."""
        self._begin()

    def end(self) -> None:
        """The caller has the first token, or has left. Calls after the first do nothing."""
        if not self._is_over:
            self._is_over = True
            for timer in self._timers:
                timer.cancel()
            for end in self._ends:
                end()

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls it at the end, too."""
        self._ends.append(callback)

    def grant(self) -> None:
        """Called by the engine, which computes nothing until `begin`, and then only this prompt until `end`."""
        if self._is_over or self._granted.done():
            return
        self._granted.set_result(True)
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(LIMIT_S, self._expire), loop.call_later(LIMIT_S + GRACE_S, self.end)]

    def lapse(self) -> None:
        """Called at the end of the request."""
        if not self._granted.done():
            self._granted.set_result(False)
