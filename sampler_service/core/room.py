"""Lets a request have the sampler to itself, whichever gateway or client sends it.

A gateway knows only its own requests, so the sampler has to do it: it runs a request that may have killed other
samplers while no other request is in work. If the sampler dies then, that request was the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tinsmith.errors import NotReady, OutOfCapacity, ServiceError
from tinsmith.tasks import set_within

PATIENCE_S = 30.0
"""Longest time for which a request that has to run alone waits for requests in work, in seconds. After that time the
requests in work are ended, and their clients send them again."""
STEP_S = 10.0
"""Longest time that the engine goes on computing a request that was cancelled, in seconds: a step that has begun."""
READ_S = 1.0
"""Longest time for which a prompt on trial waits for calls that are being read, in seconds."""
OTHERS_S = 2.5
"""Time for others after a request that ran alone, in seconds, if any was refused meanwhile. A gateway sends a refused
request again within 2 s."""


class Room:
    """Counts the requests in work, and lets one of them be alone. Belongs to the event loop."""

    def __init__(self, take_away: Callable[[ServiceError], None]) -> None:
        """`take_away` ends all requests in work with an error."""
        self._take_away = take_away
        self._num_in_work = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._empty_at = 0.0
        """Time on the event loop's clock from which no cancelled request is computed any more."""
        self._num_read = 0
        """Number of calls that are being read, or are about text."""
        self._none_read = asyncio.Event()
        self._none_read.set()
        self._none_read_at = 0.0
        """Time on the event loop's clock from which no cancelled one of these calls is worked on any more."""
        self._open = asyncio.Event()
        """Not set while a prompt on trial is computed."""
        self._open.set()
        self._is_closed = False
        """Whether a request runs alone, or waits for that."""
        self._has_refused = False
        """Whether other requests were refused since one ran alone."""
        self._others_until = 0.0
        """Time on the event loop's clock until which no request may close the room."""

    def enter(self) -> None:
        """Counts one more request in work."""
        self._num_in_work += 1
        self._empty.clear()

    def leave(self, *, cancelled: bool = False) -> None:
        """Counts a request in work as ended. `cancelled`: the engine may still compute the request."""
        self._num_in_work -= 1
        if cancelled:
            self._empty_at = asyncio.get_running_loop().time() + STEP_S
        if not self._num_in_work:
            self._empty.set()

    @asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """A context in which a request is read that need not run alone. Waits for the end of a trial. Raises
        OutOfCapacity while another request has to run alone."""
        await self._open.wait()
        if self._is_closed:
            self._has_refused = True
            raise OutOfCapacity("the sampler runs a request alone, with which other samplers died; send this one again")
        self.enter()
        self._num_read += 1
        self._none_read.clear()
        is_cancelled = False
        try:
            yield
        except asyncio.CancelledError:  # the thread of a cancelled call goes on
            is_cancelled = True
            self._none_read_at = asyncio.get_running_loop().time() + STEP_S
            raise
        finally:
            self._num_read -= 1
            if not self._num_read:
                self._none_read.set()
            self.leave(cancelled=is_cancelled)

    async def hold(self) -> bool:
        """Lets no further call be read until `reopen`, and waits for calls that are being read, READ_S at most. Returns
        whether none is read any more."""
        self._open.clear()
        await set_within(self._none_read, READ_S)
        return self._none_read.is_set() and asyncio.get_running_loop().time() >= self._none_read_at

    def reopen(self) -> None:
        """Ends the time of `hold`."""
        self._open.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """A context of a request that has the sampler to itself. Raises OutOfCapacity while it is another's turn."""
        loop = asyncio.get_running_loop()
        if self._is_closed or loop.time() < self._others_until:
            raise OutOfCapacity("it is the turn of other requests; send this one, which has to run alone, again")
        self._is_closed = True
        try:
            await self._emptied()
            yield
        finally:
            self._is_closed = False
            if self._has_refused:
                self._has_refused = False
                self._others_until = loop.time() + OTHERS_S

    async def _emptied(self) -> None:
        """Waits until no request is in work. After PATIENCE_S it takes away the requests that are left."""
        if not await set_within(self._empty, PATIENCE_S):
            self._take_away(NotReady("the sampler has to run another request alone; send this one again"))
        loop = asyncio.get_running_loop()
        while self._num_in_work or loop.time() < self._empty_at:
            await self._empty.wait()
            await asyncio.sleep(max(0.0, self._empty_at - loop.time()))
