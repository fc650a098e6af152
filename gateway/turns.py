"""Turns: what comes by the hundred, all at once, is begun a few at a time.

A gateway has one event loop, which does everything that is ready before it looks at what has come meanwhile. When a
client submits a thousand samples at once, or a sampler ends a hundred of them, that would be seconds in which no
heartbeat is read. So each of them takes a turn first: a few begin in each pass of the loop, one of each owner after the
other and of an owner in the order in which they came, and whatever takes no turn waits for those few only. So who comes
with ten thousand delays others by as many turns as there are owners.

A turn is not held, so nothing that fails, waits or is cancelled can keep it from the next one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

_PER_PASS = 4
"""About 10 ms of work. More makes a pass longer, and no work cheaper."""


class Turns:
    def __init__(self, *, per_pass: int = _PER_PASS) -> None:
        self._per_pass = per_pass
        self._num_begun = 0
        """In this pass."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By owner; the first is the next."""

    async def take(self, owner: str = "") -> None:
        """Returns when it is this one's turn: at once, where few came in this pass. What is nobody's has one place
        among the owners."""
        loop = asyncio.get_running_loop()
        if self._num_begun < self._per_pass:  # then nobody waits
            self._num_begun += 1
            if self._num_begun == 1:
                loop.call_soon(self._next_pass, loop)
            return
        turn = loop.create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        await turn

    def _next_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < self._per_pass:
            owner, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():  # who waited may have been cancelled
                turn.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            loop.call_soon(self._next_pass, loop)
