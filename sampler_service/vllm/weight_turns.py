"""Turns of full versions on the device, which has the weights of one version at a time. An exchange takes a while.

A turn ends when its version has nothing to do, or when it has lasted and another version has. So a version waits for at
most one turn of each other one, however much they have to do, and no more than a fifth of the time goes into exchanges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

_TURN_PER_EXCHANGE = 4.0
_SHORTEST_TURN_S = 0.1


class WeightTurns:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.current = 0
        """Number of the current version; 0 means the base model's own weights."""
        self._clock = clock
        self._line: list[int] = []
        """Versions that have something to do and wait for a turn, the one that has waited for longest first."""
        self._began = clock()
        self._exchange_s = 0.0
        self._is_first_step = False
        self._is_given_up = False

    def choose(self, with_work: Collection[int]) -> int:
        """The version that the next step computes. Called before each step. `with_work`: versions that have something
        to do, in the order in which they came."""
        now = self._clock()
        if self._is_first_step:  # the time since the last call includes the exchange and one step
            self._exchange_s, self._began, self._is_first_step = now - self._began, now, False
        line = [version for version in self._line if version in with_work]
        self._line = [*line, *(one for one in with_work if one not in line and one != self.current)]
        goes_on = self.current in with_work
        if not self._line or (goes_on and not self._is_over(now)):
            return self.current
        following, *self._line = self._line
        if goes_on:
            self._line.append(self.current)
        self.current, self._began, self._is_first_step, self._is_given_up = following, now, True, False
        return following

    def give_up(self) -> None:
        """Records that the current version could do none of its work."""
        self._is_given_up = True

    def _is_over(self, now: float) -> bool:
        lasted = now - self._began
        return self._is_given_up or lasted >= max(_SHORTEST_TURN_S, _TURN_PER_EXCHANGE * self._exchange_s)
