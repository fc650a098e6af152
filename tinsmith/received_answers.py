"""The answers that a run's caller has received, which decide whether its next optim_step may run."""

from __future__ import annotations

import math
import time
from asyncio import sleep
from collections import Counter
from contextvars import ContextVar

_HELD_BACK_S = 0.2
"""How long a failure is held back, in seconds. Batches that a caller has sent together with the failed one arrive in
that time. So the service sees that the caller pipelines, also when a batch fails before the next one has arrived."""
_PAUSE_S = 0.05
"""_HELD_BACK_S is waited in pauses of this length, in seconds. A pause that takes twice as long shows that the process
was busy or stopped, and that requests which arrived meanwhile are still unread. So _HELD_BACK_S begins anew."""
_BUSY_S = 5.0
"""_HELD_BACK_S begins anew during the first _BUSY_S seconds only, so that the callers of a process that is always busy
get their answers, too."""
_MOST_BATCHES = 4096
"""Most batches of one optim_step that are remembered as waiting, and most that are remembered as answered. When more
are answered, the older half of them is forgotten. The failure of a batch that is not remembered refuses the step."""

_began_s: ContextVar[float] = ContextVar("began_s", default=math.inf)
"""Time at which the request that is being handled began to arrive, by time.monotonic."""


def request_begins(began_s: float | None = None, *, is_retry: bool = False) -> None:
    """Records that a request has begun to arrive. To be called before the body of the request is read. `began_s`: time
    at which the head arrived, by time.monotonic; None means now. `is_retry`: the caller says that it has sent the
    request before. A first attempt that was lost may have begun at any time, so a retry counts as sent long ago."""
    _began_s.set(-math.inf if is_retry else time.monotonic() if began_s is None else began_s)


class ReceivedAnswers:
    """The batches of one model since its last optim_step that was applied, and which of their answers the caller has
    received. Kept by the service that answers the caller. A batch and a step count as sent when the first bytes of
    their request arrive (`request_begins`).

    A service makes an instance for a new model, and after a restart for each model whose next optim_step has come.
    Until that step, the service acts as if `step` had answered 0, because it does not know the batches from before its
    start.

    A failed batch makes the next optim_step fail, because a caller that pipelines would step with only some of the
    batches that it sent. A caller starts afresh after a failure if it received the failure, then sent a new batch, and
    waited for all answers before it sent that batch and before it sent the optim_step. Such a caller does not pipeline,
    and its optim_step may run. The service can say so only if it has accepted every operation since the last step: an
    operation that another gateway accepted may be a batch.
    """

    def __init__(self, *, after: int = 0) -> None:
        """`after`: seq_id of the optim_step whose later batches are noted; 0 for a new model."""
        self._waiting: Counter[int] = Counter()
        """Batches that the caller has sent since its last optim_step and whose answers it has not received, with the
        number of times that each was sent. Batches that were refused for now count, too, since the caller sends them
        again."""
        self._answered: set[int] = set()
        """Batches whose answers the caller has received."""
        self._failed = 0
        """seq_id of the newest failed batch whose answer the caller has received; 0 is none."""
        self._overlapped = False
        """Some batch after that failure was sent while the caller waited for the answer of another one, or for the
        failure itself."""
        self._received_s = 0.0
        """Time at which the caller received the last answer of a batch, by time.monotonic."""
        self._last_step = after, 0
        """seq_id of the last optim_step, and the answer that `step` gave for it. A repeat gets the same answer."""
        self._through = after
        """Every operation up to this seq_id was accepted here, or came before an optim_step that was applied."""
        self._beyond: set[int] = set()
        """Numbers of operations that were accepted here and are not followed by `_through`, at most _MOST_BATCHES."""

    def sent(self, seq_id: int) -> None:
        """Records that a batch has arrived from the caller. A repeat after a lost connection is not a second batch."""
        if seq_id in self._answered or seq_id <= self._last_step[0]:
            return
        if seq_id not in self._waiting:
            if len(self._waiting) >= _MOST_BATCHES:
                return
            self._overlapped |= bool(self._waiting) or _began_s.get() < self._received_s
        self._waiting[seq_id] += 1

    def unsent(self, seq_id: int) -> None:
        """Records that a batch was refused for good because of its number. Another call may have brought a batch of the
        same number, which still waits."""
        if seq_id in self._waiting:
            self._waiting[seq_id] -= 1
            self._waiting += Counter()  # drops the numbers whose count is 0

    def accepted(self, seq_id: int, *, is_batch: bool) -> None:
        """Records that a new operation was accepted. If it is no batch, a batch that was refused for now under its
        number no longer waits: the caller has given that batch up."""
        if not is_batch:
            self._waiting.pop(seq_id, None)
        if seq_id > self._through and len(self._beyond) < _MOST_BATCHES:
            self._beyond.add(seq_id)
            self._follow()

    def _follow(self) -> None:
        """Moves `_through` up to the last number before the first gap in `_beyond`."""
        while self._through + 1 in self._beyond:
            self._through += 1
            self._beyond.remove(self._through)

    async def hold_back(self, seq_id: int) -> None:
        """Waits for _HELD_BACK_S before the caller receives the failure of a batch for the first time."""
        if seq_id not in self._waiting:
            return
        num_pauses, first_s = 0, time.monotonic()
        while num_pauses * _PAUSE_S < _HELD_BACK_S:
            began_s = time.monotonic()
            await sleep(_PAUSE_S)
            was_busy = time.monotonic() - began_s >= 2 * _PAUSE_S
            num_pauses = 0 if was_busy and began_s - first_s < _BUSY_S else num_pauses + 1

    def received(self, seq_id: int, *, failed: bool) -> None:
        """Records that the caller receives the answer of an operation. Only three kinds count: a waiting batch, the
        newest failed batch, and the last optim_step. A failure that is fetched again counts again, because the caller
        may not have received it before."""
        if seq_id == self._last_step[0] and not failed:  # a step that failed may have left the gradients as they are
            self._answered = {answered for answered in self._answered if answered > seq_id}
            if self._failed < seq_id:
                self._failed, self._overlapped = 0, False
            self._through = max(self._through, seq_id)
            self._beyond = {accepted for accepted in self._beyond if accepted > self._through}
            self._follow()
        if seq_id not in self._waiting and not (failed and seq_id == self._failed):
            return
        del self._waiting[seq_id]
        self._answered.add(seq_id)
        self._received_s = time.monotonic()
        if len(self._answered) > _MOST_BATCHES:
            self._answered = set(sorted(self._answered)[_MOST_BATCHES // 2 :])
        if failed:
            overlapped = bool(self._waiting) or max(self._answered) > seq_id
            self._overlapped = overlapped or (self._overlapped and seq_id <= self._failed)
            self._failed = max(self._failed, seq_id)

    def step(self, seq_id: int) -> int:
        """Records that an optim_step has arrived. Returns the seq_id of the failed batch after which the caller has
        started afresh; 0 if the caller has not."""
        if seq_id != self._last_step[0]:
            newest = max(self._answered, default=0)
            is_waited_for = not self._waiting.keys() - {seq_id} and _began_s.get() >= self._received_s
            is_whole = self._through >= seq_id - 1
            afresh = newest > self._failed and not self._overlapped and is_waited_for and is_whole
            self._last_step = seq_id, self._failed if afresh else 0
            # A caller need not ask for every answer. One that it never asks for may not hold up later batches. Nor may
            # a number that is too far ahead, which was refused for now before it could be refused for good.
            kept = range(seq_id + 1, seq_id + _MOST_BATCHES)
            self._waiting = Counter({waiting: n for waiting, n in self._waiting.items() if waiting in kept})
        return self._last_step[1]
