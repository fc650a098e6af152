"""Parts that keep many or large requests from holding up all others: a bound on the memory of bodies, turns for large
bodies, and a pace at which requests and samples begin."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from prometheus_client import Gauge, Histogram

from tinsmith.errors import OutOfCapacity

SMALL_BYTES = 64 * 2**10
"""Largest body that does not count, in bytes."""
_PER_PASS = 4
"""Turns in one pass of the event loop: about 10 ms of work. More turns would make a pass longer, and no work
cheaper."""
_LONGEST_TURN_S = 1.0
"""Longest turn of a body, in seconds. A turn is bounded because the trainer may be away for longer."""

_RECEIVED_AT_ONCE = 4
"""Most large bodies of one owner that come in at once."""

_LOOK_S = 0.02
"""Pause between two looks at the processor time of the event loop, in seconds."""


async def watch_event_loop(stalls: Histogram) -> None:
    """Measures how long the event loop's thread computes between two runs of a task that is due every _LOOK_S.

    The unit is seconds of processor time of that thread. So other processes, and other threads of this process, do not
    count.
    """
    before = time.thread_time()
    while True:
        await asyncio.sleep(_LOOK_S)
        now = time.thread_time()
        stalls.observe(now - before)
        before = now


class Bodies:
    """Bounds the memory of request bodies, for all clients together.

    An owner's only body may have all bytes that are free. An owner with several bodies may hold at most as many bytes
    as stay free, so half of the bound when no other owner has bodies. (`HeldBytes` has this rule for the trainer's
    models.) So an owner whose bodies never end, or whose samples wait for long, leaves room for other owners.

    A body counts from its first byte until its request is answered. For a training operation that is when the trainer
    has it in its journal. The body of a sample counts until the sample is done, because it may have to be sent again.
    Small bodies do not count, so that heartbeats and polls get through when large bodies fill the bound.
    """

    def __init__(self, max_bytes: int, gauge: Gauge) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._by_owner: Counter[str] = Counter()
        self._gauge = gauge

    def has_room(self, owner: str, more: int, *, own_share: int) -> bool:
        """Whether the owner may hold `more` further bytes for a request. `own_share`: bytes that the request holds."""
        free = self.max_bytes - self.num_bytes - more
        held = self._by_owner[owner]
        return free >= 0 and (held == own_share or held + more <= free)

    def add(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._by_owner[owner] += num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        self._gauge.set(self.num_bytes)


class Share:
    """The share of one request in `Bodies`."""

    def __init__(self, bodies: Bodies, owner: str, *, beside: Share | None = None) -> None:
        """`beside`: another share of the same request. The two shares count as one body."""
        self._bodies = bodies
        self._owner = owner
        self._beside = beside
        self._num_bytes = 0
        self._num_counted = 0

    def take(self, num_bytes: int) -> None:
        """Adds bytes to the share. Raises OutOfCapacity, and releases the share, when the owner's shares would exceed
        what the owner may hold."""
        self._num_bytes += num_bytes
        if self._num_bytes <= SMALL_BYTES:
            return
        more = self._num_bytes - self._num_counted
        own_share = self._num_counted + (0 if self._beside is None else self._beside._num_counted)
        if not self._bodies.has_room(self._owner, more, own_share=own_share):
            self.release()
            raise OutOfCapacity(
                f"request bodies of {self._bodies.num_bytes} bytes are in work, and this one would exceed its owner's "
                f"share of max_held_body_bytes, {self._bodies.max_bytes}; try again"
            )
        self._bodies.add(self._owner, more)
        self._num_counted = self._num_bytes

    def release(self) -> None:
        self._bodies.add(self._owner, -self._num_counted)
        self._num_bytes = self._num_counted = 0


class _FairQueue:
    """A queue of requests. Owners take turns one after the other, and each owner's requests go in their order of
    arrival."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """owner -> futures of its waiting requests. The first owner has the next turn."""

    def __bool__(self) -> bool:
        return bool(self._owners)

    def join(self, owner: str) -> asyncio.Future[None]:
        waiting = asyncio.get_running_loop().create_future()
        self._owners.setdefault(owner, deque()).append(waiting)
        return waiting

    def wake(self) -> bool:
        """Ends the wait of the next request. Returns False when no request waits."""
        while self._owners:
            owner, waiting = self._owners.popitem(last=False)
            first = waiting.popleft()
            if waiting:
                self._owners[owner] = waiting
            if not first.done():  # it is done if the waiting task was cancelled
                first.set_result(None)
                return True
        return False


class Turns:
    """Turns for work on large bodies, one at a time.

    Reading a body of megabytes takes tenths of a second of the interpreter's lock and of a core, here and then in the
    trainer. Bodies that were read one right after the other would hold up all other requests and computations. So a
    turn is followed by a pause of the same length. Owners take turns one after the other, so the bodies of one owner
    delay a body of another owner by one turn.
    """

    def __init__(self, *, longest_s: float = _LONGEST_TURN_S) -> None:
        """`longest_s`: seconds after which a turn no longer delays the next one."""
        self.longest_s = longest_s
        self.is_taken = False
        """True in a turn, and in the pause after it."""
        self._waiting = _FairQueue()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """A context that is entered when the owner has a turn, which lasts until the context ends."""
        if self.is_taken:
            turn = self._waiting.join(owner)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the turn came at the same moment
                    self._next()
                raise
        self.is_taken = True
        loop = asyncio.get_running_loop()
        began_s, is_over = loop.time(), False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                loop.call_later(min(loop.time() - began_s, self.longest_s), self._next)

        limit = loop.call_later(self.longest_s, end)
        try:
            yield
        finally:
            limit.cancel()
            end()

    def _next(self) -> None:
        self.is_taken = self._waiting.wake()


class Receiving:
    """Lets few large bodies of an owner come in at once. A body that takes longer than 1 s gives its place to the next
    one, and goes on.

    Reading from a connection takes the event loop's time, whether the body will ever end or not. The connections of
    waiting bodies are not read.
    """

    def __init__(self, *, at_once: int = _RECEIVED_AT_ONCE, longest_s: float = _LONGEST_TURN_S) -> None:
        """`longest_s`: seconds after which a body no longer delays others."""
        self._at_once = at_once
        self._longest_s = longest_s
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        """A context in which a large body of the owner comes in. It is entered when the owner has a free place."""
        slots = self._slots.setdefault(owner, asyncio.Semaphore(self._at_once))
        await slots.acquire()
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                slots.release()

        limit = asyncio.get_running_loop().call_later(self._longest_s, release)
        try:
            yield
        finally:
            limit.cancel()
            release()


class Pacer:
    """Spreads work over passes of the event loop: each piece of work takes a turn first, and a pass has a few turns.

    The event loop runs everything that is ready before it reads new input. A client that submits a thousand samples at
    once, or a sampler that ends a hundred, would thus keep all heartbeats waiting for seconds. So each request, and
    each sample, first takes a turn. A few turns begin in each pass of the loop, and other work waits for those few
    only. Owners take turns one after the other, and the work of one owner goes in its order of arrival. So a burst of
    ten thousand delays another owner's work by at most as many turns as there are owners.

    A turn is not held, so work that fails, waits or is cancelled does not block the next turn.
    """

    def __init__(self, *, per_pass: int = _PER_PASS) -> None:
        self._per_pass = per_pass
        self._num_begun = 0
        """Number of turns that were given in this pass."""
        self._waiting = _FairQueue()

    async def turn(self, owner: str = "") -> None:
        """Waits for a turn; returns at once while this pass has turns left. The empty string counts as a further
        owner."""
        loop = asyncio.get_running_loop()
        if self._num_begun < self._per_pass:  # nobody can be waiting then
            self._num_begun += 1
            if self._num_begun == 1:
                loop.call_soon(self._next_pass, loop)
            return
        await self._waiting.join(owner)

    def _next_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_begun = 0
        while self._num_begun < self._per_pass and self._waiting.wake():
            self._num_begun += 1
        if self._num_begun:
            loop.call_soon(self._next_pass, loop)
