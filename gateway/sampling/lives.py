"""Finds requests that kill samplers, and condemns none that does not.

When a sampler's process or engine dies, any request that it had in work may be the cause, so the death counts against
all of them. A request with a death is on trial: it asks the next sampler to run it while that one runs nothing else, of
no gateway (sampler_service/core/room.py). If the sampler confirms this and dies, the request was the cause and is given
to no other sampler.

A trial takes twice the time for which the request had been in work when the first sampler died, and does not end before
its first token. A request that survives its trial runs beside others again. Trials of many requests, after a sampler
was killed from outside, would keep all others waiting for minutes. So a row of trials is bounded, and requests that
have had none by then run beside others. If another sampler dies with such a request in work, the request runs alone
until it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

TRIALS_S = 20.0
"""Longest time for which a sampler runs trials in a row while other requests wait, in seconds."""

MARGIN_S = 1.0
"""Time of a trial beyond twice the time for which its request had been in work at the death, in seconds."""


@dataclass(slots=True, eq=False)
class Suspicion:
    """How much one request is suspected."""

    deaths: int = 0
    """Number of samplers that died and may have been killed by the request."""
    was_in_work_s: float = 0.0
    """Time for which the last of these samplers had had the request in work."""
    is_released: bool = False
    """Whether the request has survived its trial, or is excused from it."""
    is_alone: bool = False
    """Whether its sampler has confirmed that it runs no other request."""
    has_begun: bool = False
    """Whether its sampler has sent a first token."""
    began_at: float = 0.0
    """Time on the event loop's clock at which its sampler got it."""

    @property
    def is_on_trial(self) -> bool:
        return self.deaths == 1 and not self.is_released

    @property
    def runs_alone(self) -> bool:
        """Whether a sampler may have no other request in work beside this one."""
        return self.is_on_trial or self.deaths >= 2


class Life:
    """One life of a sampler's process: from when it begins to serve until it is lost.

    Requests that run alone, and the others, are let in by turns. Others wait for a row of trials, or for one request
    that runs alone until it ends.
    """

    def __init__(self, boot_id: str = "") -> None:
        self.boot_id = boot_id
        self.is_over = False
        self._alone: Suspicion | None = None
        """The request that has the sampler to itself, or waits there until it has."""
        self._waiting: dict[Suspicion, asyncio.Future[None]] = {}
        """Requests that wait for their turn, in the order of their arrival."""
        self._trials_until: float | None = None
        """Time on the event loop's clock at which the row of trials ends; None before the first trial has begun."""
        self._end_trial: Callable[[], None] | None = None
        """Ends the call of the trial in progress."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs until the trial in progress has taken its time."""

    @property
    def is_closed(self) -> bool:
        """Whether a request runs here alone, or will."""
        return self._alone is not None or bool(self._waiting)

    @asynccontextmanager
    async def work(self, mine: Suspicion) -> AsyncIterator[None]:
        """Waits for the request's turn. The sampler has the request in work until the block ends.

        The block must look at `is_over`: the sampler may have died before the request's turn. For a request that runs
        alone, the block must call `confirm`.
        """
        mine.is_alone = mine.has_begun = False
        turn = self._waiting[mine] = asyncio.get_running_loop().create_future()
        try:
            self._let_in()
            await turn
            mine.began_at = _now()
            yield
        finally:
            self._leave(mine)

    def confirm(self, mine: Suspicion, end_trial: Callable[[], None]) -> None:
        """Notes that the sampler runs nothing beside this request. `end_trial`: ends the request's call, so that it is
        sent again."""
        mine.is_alone = True
        if mine.is_on_trial and self._alone is mine:
            if self._trials_until is None:
                self._trials_until = _now() + TRIALS_S
            self._end_trial = end_trial
            ends_at = min(_now() + 2 * mine.was_in_work_s + MARGIN_S, self._trials_until)
            self._timer = asyncio.get_running_loop().call_at(ends_at, self._has_stood_trial)

    def begun(self, mine: Suspicion) -> None:
        """Notes that the sampler has sent a token of this request."""
        if not mine.has_begun:
            mine.has_begun = True
            self._end_trial_for_others()

    def ends(self, mine: Suspicion) -> bool:
        """Notes that the sampler died with this request in work. True when the request is condemned."""
        self.is_over = True
        self._let_in()
        if mine.runs_alone and not mine.is_alone:
            return False  # the sampler had not begun with it
        mine.deaths += 1
        mine.was_in_work_s = _now() - mine.began_at
        return mine.deaths >= 2 and mine.is_alone

    def _leave(self, mine: Suspicion) -> None:
        self._waiting.pop(mine, None)
        was_alone = self._alone is mine
        if was_alone:
            self._alone = self._end_trial = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._let_in(others_first=was_alone)

    def _let_in(self, *, others_first: bool = False) -> None:
        """Begins the turns of those that may go now."""
        if self.is_over:
            self._admit(list(self._waiting))
        elif self._alone is not None:
            self._end_trial_for_others()
        else:
            trials = [one for one in self._waiting if one.is_on_trial]
            if self._trials_until is not None and _now() >= self._trials_until:
                for one in trials:
                    one.is_released = True
                trials.clear()
            if not trials:
                self._trials_until = None
            others = [one for one in self._waiting if not one.runs_alone]
            if trials:  # a request that kills samplers mostly does so soon after it came
                self._run_alone(min(trials, key=lambda one: one.was_in_work_s))
            elif others and (others_first or len(others) == len(self._waiting)):
                self._admit(others)
            elif self._waiting:
                self._run_alone(next(one for one in self._waiting if one.runs_alone))

    def _run_alone(self, mine: Suspicion) -> None:
        self._alone = mine
        self._admit([mine])

    def _admit(self, those: list[Suspicion]) -> None:
        for mine in those:
            turn = self._waiting.pop(mine)
            if not turn.done():  # its caller may have left
                turn.set_result(None)

    def _has_stood_trial(self) -> None:
        self._timer = None
        self._end_trial_for_others()

    def _end_trial_for_others(self) -> None:
        """Ends a trial that has taken its time, if another request waits."""
        mine, end = self._alone, self._end_trial
        if mine is not None and end is not None and self._timer is None and mine.has_begun and self._waiting:
            self._end_trial = None
            mine.is_released = True
            end()


def _now() -> float:
    return asyncio.get_running_loop().time()
