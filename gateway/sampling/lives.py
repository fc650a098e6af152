"""Finds requests that kill samplers, and condemns none that does not.

When a sampler's process or engine dies, any request that it had in work may be the cause, so the death counts against
all of them. A request is condemned by its second death, or a later one, if it had the sampler to itself.

A request with one death is on trial until its first token. A sampler takes one such request at a time, and computes
its prompt while it computes nothing else, if its engine can (sampler_service/core/trial.py). It says so before. A death
between that and the first token condemns, and counts against no other request.

A request with two deaths has a sampler to itself until it ends, so it is given to no more than one sampler after these
two.

Requests of other gateways are not known here. Where there are several gateways, a request with two deaths asks the
sampler to run it while it runs no other (sampler_service/core/room.py), and only a death after the sampler's
confirmation condemns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tinsmith.errors import NotReady, ServiceError

PATIENCE_S = 30.0
"""Longest time for which a request that has to run alone waits for those in work, in seconds. They may be long, or have
slow readers. They are taken away then, and sent again."""

STEP_S = 10.0
"""Longest time that a sampler goes on computing a request whose call was cancelled, in seconds: a step that has begun.
A step has a bounded number of tokens, and takes less than a second nearly everywhere."""


@dataclass(slots=True, eq=False)
class Suspicion:
    """How much one request is suspected."""

    ended: list[Life] = field(default_factory=list)
    """The lives of samplers that ended with the request in work, and not of another one's trial."""
    came_alone_as: int | None = None
    """Its number among the requests of its sampler, if there were no others when it came."""
    is_alone_for_sure: bool = False
    """Whether its sampler has said that it runs no other request, of no gateway."""

    @property
    def deaths(self) -> int:
        """Number of samplers that died and may have been killed by the request."""
        return len(self.ended)

    @property
    def is_on_trial(self) -> bool:
        """Whether a sampler should compute its prompt alone."""
        return self.deaths == 1

    @property
    def runs_alone(self) -> bool:
        """Whether a sampler may have no other request in work beside this one."""
        return self.deaths >= 2


class Life:
    """One life of a sampler's process: from when it begins to serve until it is lost.

    Requests that run alone, and the others, are let in by turns. So each request waits for no more than one that runs
    alone, and for those in work before that.
    """

    def __init__(
        self, boot_id: str = "", *, is_shared: bool = False, take_away: Callable[[], None] = lambda: None
    ) -> None:
        """`is_shared`: other gateways may use the sampler, too. `take_away` ends the calls in work, whose requests are
        then sent again."""
        self.boot_id = boot_id
        self.is_shared = is_shared
        self.is_over = False
        self._take_away = take_away
        self._trial = asyncio.Lock()
        self._tried: Suspicion | None = None
        """The request whose prompt the sampler computes now, and nothing else, as the sampler has said."""
        self._in_work: set[Suspicion] = set()
        self._num_let_in = 0
        self._alone: Suspicion | None = None
        """The request that has the sampler to itself."""
        self._waiting: dict[Suspicion, asyncio.Future[None]] = {}
        """Requests that wait for their turn, in the order of their arrival."""
        self._patience: asyncio.TimerHandle | None = None
        """Runs while a request that has to run alone waits for those in work."""
        self._empty_at = 0.0
        """Time on the event loop's clock from which the sampler computes no cancelled call any more."""
        self._emptying: asyncio.TimerHandle | None = None
        """Runs while a request that has to run alone waits for that time."""

    @property
    def is_closed(self) -> bool:
        """Whether a request runs here alone, or will as soon as those in work have ended."""
        return self._alone is not None or bool(self._waiting)

    @asynccontextmanager
    async def work(self, mine: Suspicion) -> AsyncIterator[Callable[[], None]]:
        """Waits for the request's turn. The sampler has the request in work until the block ends.

        The block gets a function, and must call it at the first token. It must look at `is_over`: the sampler may have
        died before the request's turn.
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
            # Any other error is the sampler's answer, which has ended the request there.
            if mine in self._in_work and (isinstance(error, NotReady) or not isinstance(error, ServiceError)):
                self._has_cancelled()
            raise
        finally:
            begun()
            self._leave(mine)

    def ends(self, mine: Suspicion) -> bool:
        """Notes that the sampler died with this request in work. True when the request is condemned."""
        self.is_over = True
        self._let_in()
        if self._tried is not None and self._tried is not mine:
            return False
        mine.ended.append(self)
        was_alone = mine.came_alone_as == self._num_let_in and (mine.is_alone_for_sure or not self.is_shared)
        return mine.deaths >= 2 and (was_alone or self._tried is mine)

    def tries(self, mine: Suspicion) -> None:
        """Notes that the sampler computes nothing but the prompt of this request, until its first token."""
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
        """Begins the turns of those that may go now."""
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

    def _admit(self, those: list[Suspicion]) -> None:
        for mine in those:
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
