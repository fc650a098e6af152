"""Finds the requests that kill samplers. A request that kills none is never condemned.

When a sampler's process or engine dies, each request that the sampler had in work may be the cause, so the death counts
against all of them. A request is condemned, which means that it fails and no other sampler gets it, when it has at
least two deaths and had the sampler to itself at the last one.

- After one death a request is on trial. A sampler takes one such request at a time. If its engine can, it computes the
  prompt of that request while it computes nothing else (sampler_service/core/trial.py), and tells the gateway before it
  begins. If the sampler dies between that message and the first token, only the request on trial can be the cause: the
  death condemns this request, and counts against no other.
- After two deaths a request has a sampler to itself until the request ends. So it kills at most one more sampler.

This gateway does not know the requests that other gateways send to the same sampler. Where there are several gateways,
a request with two deaths asks the sampler to run it alone (sampler_service/core/room.py), and a death condemns the
request only after the sampler has confirmed that it runs no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinsmith.errors import NotReady, ServiceError

PATIENCE_S = 30.0
"""Longest time for which a request that has to run alone waits for the requests in work, in seconds. Those may be long,
or their clients may read slowly. After that time they are cancelled at this sampler, and sent again."""

STEP_S = 10.0
"""Longest time for which a sampler still computes a request whose call was cancelled, in seconds. The sampler finishes
the step that it has begun. A step has a bounded number of tokens, and takes less than a second on most machines."""


@dataclass(slots=True, eq=False)
class Suspicion:
    """The deaths of samplers that one request may have caused."""

    deaths: int = 0
    """Number of samplers that ended while the request was in work, unless another request was on trial then."""
    is_condemned: bool = False
    """True when at least two samplers have died with the request in work, the last one while it computed nothing else.
    The request is given to no other one."""
    ends_at: float | None = None
    """Time at which the gateway forgets the deaths, in seconds since 1970. None if it does so when the request ends."""
    came_alone_as: int | None = None
    """The request's number among all requests that its sampler has been given. None if the sampler had others in work
    when the request was sent."""
    is_alone_for_sure: bool = False
    """True when the sampler has confirmed that it runs no other request, of this gateway or another one."""

    @property
    def is_on_trial(self) -> bool:
        """True when a sampler should compute the request's prompt while it computes nothing else."""
        return self.deaths == 1

    @property
    def runs_alone(self) -> bool:
        """True when the request must have its sampler to itself."""
        return self.deaths >= 2


class Life:
    """One life of a sampler's process, from the time at which it begins to serve until it is lost.

    Requests that run alone take turns with the others: one request alone, then all others that wait. So a request waits
    at most for the requests in work, and for one request that runs alone.
    """

    def __init__(
        self, boot_id: str = "", *, is_shared: bool = False, take_away: Callable[[], None] = lambda: None
    ) -> None:
        """`is_shared`: other gateways may use the sampler, too. `take_away`: cancels the sampler's calls in work, whose
        requests are then sent again."""
        self.boot_id = boot_id
        self.is_shared = is_shared
        self.is_over = False
        self._take_away = take_away
        self._trial = asyncio.Lock()
        self._tried: Suspicion | None = None
        """The request on trial whose prompt the sampler computes now, while it computes nothing else, as it has told
        the gateway."""
        self._in_work: set[Suspicion] = set()
        self._num_let_in = 0
        self._alone: Suspicion | None = None
        """The request that has the sampler to itself."""
        self._waiting: dict[Suspicion, asyncio.Future[None]] = {}
        """Requests that wait until they may be sent to the sampler, in the order of their arrival."""
        self._patience: asyncio.TimerHandle | None = None
        """Timer that runs while a request that has to run alone waits for the requests in work."""
        self._empty_at = 0.0
        """Time from which the sampler certainly computes no cancelled request any more, by the event loop's clock."""
        self._emptying: asyncio.TimerHandle | None = None
        """Timer that runs while a request that has to run alone waits for `_empty_at`."""

    @property
    def is_closed(self) -> bool:
        """True when a request runs alone here, or waits for its turn. New requests are better sent to another
        sampler."""
        return self._alone is not None or bool(self._waiting)

    @asynccontextmanager
    async def work(self, mine: Suspicion) -> AsyncIterator[Callable[[], None]]:
        """A context in which the sampler may have the request `mine` in work. Entering waits for the request's turn.

        The context gives a function that the caller must call at the first token. The caller must look at `is_over`
        first: the sampler may have died before the request's turn.
        """
        on_trial = mine.is_on_trial
        if on_trial:
            await self._trial.acquire()

        def begun() -> None:
            nonlocal on_trial
            if self._tried is mine and not self.is_over:
                self._tried = None
            if on_trial:
                on_trial = False
                self._trial.release()

        turn = self._waiting[mine] = asyncio.get_running_loop().create_future()
        try:
            self._let_in()
            await turn
            yield begun
        except BaseException as error:
            # Every other ServiceError is the sampler's own answer, after which it computes the request no more.
            if mine in self._in_work and (isinstance(error, NotReady) or not isinstance(error, ServiceError)):
                self._has_cancelled()
            raise
        finally:
            begun()
            self._leave(mine)

    def ends(self, mine: Suspicion) -> bool:
        """Notes that the sampler has died with the request `mine` in work. Returns True when that condemns the
        request."""
        self.is_over = True
        self._let_in()
        if self._tried is not None and self._tried is not mine:
            return False
        mine.deaths += 1
        was_alone = mine.came_alone_as == self._num_let_in and (mine.is_alone_for_sure or not self.is_shared)
        mine.is_condemned = mine.deaths >= 2 and (was_alone or self._tried is mine)
        return mine.is_condemned

    def tries(self, mine: Suspicion) -> None:
        """Notes that from now on until the first token the sampler computes nothing but the prompt of `mine`."""
        if not self.is_over:
            self._tried = mine

    def _leave(self, mine: Suspicion) -> None:
        self._waiting.pop(mine, None)
        self._in_work.discard(mine)
        was_alone = self._alone is mine
        if was_alone:
            self._alone = None
        self._let_in(others_first=was_alone)

    def _let_in(self, *, others_first: bool = False) -> None:
        """Begins the turns of the waiting requests that may be sent to the sampler now. `others_first`: those that need
        not run alone go first, because one has just run alone."""
        if self.is_over:
            for turn in self._waiting.values():
                _begin(turn)
            self._waiting.clear()
        elif self._alone is None:
            alone = [one for one in self._waiting if one.runs_alone]
            others = [one for one in self._waiting if not one.runs_alone]
            if others and (others_first or not alone):
                self._admit(others)
            elif alone and not self._in_work and self._is_empty:
                self._alone = alone[0]
                self._admit(alone[:1])
            elif alone and not self._in_work and self._emptying is None:
                self._emptying = asyncio.get_running_loop().call_at(self._empty_at, self._has_emptied)
        self._set_patience()

    @property
    def _is_empty(self) -> bool:
        return asyncio.get_running_loop().time() >= self._empty_at

    def _has_cancelled(self) -> None:
        self._empty_at = asyncio.get_running_loop().time() + STEP_S

    def _has_emptied(self) -> None:
        self._emptying = None
        self._let_in()

    def _admit(self, admitted: list[Suspicion]) -> None:
        for mine in admitted:
            self._num_let_in += 1
            mine.came_alone_as = self._num_let_in if not self._in_work and self._is_empty else None
            mine.is_alone_for_sure = False
            self._in_work.add(mine)
            _begin(self._waiting.pop(mine))

    def _set_patience(self) -> None:
        waits = not self.is_over and self._alone is None and any(one.runs_alone for one in self._waiting)
        if self._emptying is not None and not waits:
            self._emptying.cancel()
            self._emptying = None
        if waits and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._clear)
        elif not waits and self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _clear(self) -> None:
        self._patience = None
        self._take_away()
        if self._in_work:
            self._has_cancelled()
        self._in_work.clear()
        self._let_in()


def _begin(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # its caller may have left
        turn.set_result(None)
