"""What the caller of a run has been told of its batches."""

from __future__ import annotations


class Told:
    """The batches of one model since its last optim_step, as the service that answers its caller sees them.

    A failed batch makes the next optim_step fail, because a caller that pipelines would step on half of what it has
    sent. A caller that was told of the failure, and sent a batch and its optim_step each after all answers before them,
    does not pipeline: it has started afresh behind the failure.
    """

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        """Batches that have been sent and whose answers the caller does not have."""
        self._newest = 0
        self._failed = 0
        """The newest failed batch that the caller was told of."""
        self._overlapped = False
        """Since that failure some batch was sent while the caller waited for the answer of another."""
        self._last_step = 0, 0
        """seq_id, and what was said of it: a repeat is told the same."""

    @property
    def is_idle(self) -> bool:
        """There is nothing that a next step would have to know."""
        return not self._waiting and not self._failed

    def sent(self, seq_id: int) -> None:
        """A batch has arrived."""
        self._overlapped |= bool(self._waiting)
        self._waiting.add(seq_id)
        self._newest = max(self._newest, seq_id)

    def unsent(self, seq_id: int) -> None:
        """It was not accepted, and is to be sent again."""
        self._waiting.discard(seq_id)

    def told(self, seq_id: int, *, failed: bool) -> None:
        """The caller gets the answer of an operation. What is no batch that waits changes nothing."""
        if seq_id not in self._waiting:
            return
        self._waiting.discard(seq_id)
        if failed:
            self._failed = max(self._failed, seq_id)
            self._overlapped = bool(self._waiting)

    def step(self, seq_id: int) -> int:
        """An optim_step has arrived: the failed batch behind which its caller has started afresh; 0 is none."""
        if seq_id != self._last_step[0]:
            afresh = self._newest > self._failed and not self._overlapped and not self._waiting
            self._last_step = seq_id, self._failed if afresh else 0
            self._failed, self._overlapped = 0, False
        return self._last_step[1]
