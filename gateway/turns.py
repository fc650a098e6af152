"""Turns: spreads work that arrives in bursts over many passes of the event loop.

The event loop runs everything that is ready before it reads new input. A client that submits a thousand samples at
once, or a sampler that ends a hundred, would thus keep all heartbeats waiting for seconds. So each sample first takes a
turn. A few turns begin in each pass of the loop, and other work waits for those few only. Owners take turns one after
the other, and the work of one owner goes in its order of arrival. So a burst of ten thousand delays another owner's
work by at most as many turns as there are owners.

A turn is not held, so work that fails, waits or is cancelled does not block the next turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

_PER_PASS = 4
"""Turns in one pass of the event loop: about 10 ms of work. More turns make a pass longer, and no work cheaper."""


class Turns:
    """Gives out turns, a few in each pass of the event loop."""

    def __init__(self, *, per_pass: int = _PER_PASS) -> None:
        self._per_pass = per_pass
        self._num_begun = 0
        """Turns that were given in this pass."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """owner -> waiting turns; the first owner is the next."""

    async def take(self, owner: str = "") -> None:
        """Waits for a turn; returns at once while this pass has turns left. "" counts as one owner more."""
        loop = asyncio.get_running_loop()
        if self._num_begun < self._per_pass:  # nobody can be waiting then
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
            if not turn.done():  # it is done if the waiting task was cancelled
                turn.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            loop.call_soon(self._next_pass, loop)
