"""The trial of a request: the engine computes the prompt of this request and nothing else, so that a death of the
sampler can have only one cause.

The other requests wait meanwhile, and keep their part of the KV cache. The engine stops between two steps, until the
caller has been told that the prompt is next. After the prompt it stops again, until the caller has the first token. So
if the sampler dies between these two messages, the prompt has killed it. The caller is a gateway, which draws that
conclusion (gateway/sampling/lives.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 10.0
"""Longest time for which the other requests wait for a prompt on trial, in seconds. After that time the rest of the
prompt is computed together with them."""
GRACE_S = 5.0
"""Time for which the other requests wait after LIMIT_S until the caller has read that the trial is over, in seconds."""


class Trial:
    """The trial of one request. All methods run on the event loop."""

    def __init__(self, *, begin: Callable[[], None], end: Callable[[], None], expire: Callable[[], None]) -> None:
        """`begin`: lets the engine compute the prompt. `end`: lets the engine compute everything. `expire`: sends the
        caller an empty piece of the answer, which tells it that the trial is over."""
        self._begin = begin
        self._ends = [end]
        self._expire = expire
        self._granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._is_over = False

    async def granted(self) -> bool:
        """Waits until the engine computes nothing. Returns False when the request has ended before that."""
        return await self._granted

    def begin(self) -> None:
        """Called once the caller has been told that the prompt is next."""
        self._begin()

    def end(self) -> None:
        """Called once the caller has the first token, or has left. A second call does nothing."""
        if not self._is_over:
            self._is_over = True
            for timer in self._timers:
                timer.cancel()
            for end in self._ends:
                end()

    def at_end(self, callback: Callable[[], None]) -> None:
        """Has `callback` called at the end of the trial, too."""
        self._ends.append(callback)

    def grant(self) -> None:
        """Called by the engine once it computes nothing. It goes on so until `begin`, and then computes only the prompt
        until `end`."""
        if self._is_over or self._granted.done():
            return
        self._granted.set_result(True)
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(LIMIT_S, self._expire), loop.call_later(LIMIT_S + GRACE_S, self.end)]

    def lapse(self) -> None:
        """Called when the request ends, perhaps before the engine has granted the trial."""
        if not self._granted.done():
            self._granted.set_result(False)
