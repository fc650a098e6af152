"""The measured speed of the compute thread, and the sizes of micro-batches that follow from it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

_SHARED_MICRO_BATCH_S = {"cpu": 0.1, "cuda": 0.5}
"""Time that a micro-batch should take when several models share the trainer, in seconds. Operations that arrive
meanwhile wait for its end. On CUDA a micro-batch takes 0.2 to 0.5 s however few its tokens are, while the host starts
its operations (benchmarks/README.md, "On one GPU")."""
_LATE = 2.0
"""A micro-batch that takes more than this many times _SHARED_MICRO_BATCH_S makes the next short ones smaller."""
_KEPT = 0.9
"""Weight of the earlier measurements in a moving average when a new one is added."""
_MIN_TOKENS = {"cpu": 256, "cuda": 2048}
"""Smallest token limit of a micro-batch. Matrix products of fewer rows take longer per row."""
_LARGE_KEPT = 5
"""Number of large micro-batches whose median is the speed."""
_LARGE_S = 0.05
"""A micro-batch counts as large when it would take at least this long at the speed of large ones, in seconds."""


@dataclass(slots=True)
class Speed:
    """The measured speed of the thread's micro-batches and calls: moving averages of their times.

    Micro-batches are weighted by their tokens, so that many small ones do not hide how fast a large one is.
    """

    device_type: str = "cpu"
    """cpu or cuda."""
    _tokens: float = 0.0
    _token_seconds: float = 0.0
    _loss_seconds: float = 0.0
    """The part of `_token_seconds` that custom losses took."""
    _expected_loss_seconds: float = 0.0
    """Time that was expected for custom losses."""
    _calls: float = 0.0
    _call_seconds: float = 0.0
    _large: deque[float] = field(default_factory=lambda: deque(maxlen=_LARGE_KEPT))
    """Tokens per second of the newest large micro-batches."""
    _most_short: float = math.inf
    """Most tokens of a short micro-batch, because an earlier one was late."""

    @property
    def large_tokens_per_s(self) -> float:
        """Median speed of the newest large micro-batches, so that a single disturbed one does not count; 0 before the
        first."""
        return median(self._large) if self._large else 0.0

    def tokens_of(self, seconds: float) -> int:
        """Expected number of tokens of a micro-batch that takes `seconds`; at least _MIN_TOKENS."""
        return max(_MIN_TOKENS[self.device_type], round(self.large_tokens_per_s * seconds))

    @property
    def short_tokens(self) -> int:
        """Most tokens of a micro-batch that should take _SHARED_MICRO_BATCH_S.

        When other processes take the cores, the median notices it after three large micro-batches. Other models would
        wait for each of these. So a late micro-batch lowers the limit at once, and each micro-batch in time doubles it.
        """
        return int(min(self.tokens_of(_SHARED_MICRO_BATCH_S[self.device_type]), self._most_short))

    def observe(
        self, seconds: float, *, num_tokens: int, loss_seconds: float = 0.0, expected_loss_seconds: float = 0.0
    ) -> None:
        """Records the time of a micro-batch of `num_tokens` tokens; 0 tokens mean a call. `loss_seconds`: the part that
        custom losses took. `expected_loss_seconds`: the part that they were expected to take."""
        if num_tokens:
            without_losses = seconds - min(loss_seconds, 0.999 * seconds)
            self._note_large(num_tokens, without_losses)
            self._note_late(num_tokens, without_losses)
            self._tokens = _KEPT * self._tokens + num_tokens
            self._token_seconds = _KEPT * self._token_seconds + seconds
            # Several ranks compute losses at once, so the sum of their times may exceed the micro-batch's time.
            self._loss_seconds = _KEPT * self._loss_seconds + min(loss_seconds, 0.999 * seconds)
            self._expected_loss_seconds = _KEPT * self._expected_loss_seconds + expected_loss_seconds
        else:
            self._calls = _KEPT * self._calls + 1
            self._call_seconds = _KEPT * self._call_seconds + seconds

    def _note_large(self, num_tokens: int, seconds: float) -> None:
        """Records the speed of a large micro-batch. Small ones are ignored: they take longer per token."""
        if num_tokens >= self.large_tokens_per_s * _LARGE_S:
            self._large.append(num_tokens / seconds)

    def _note_late(self, num_tokens: int, seconds: float) -> None:
        """Lowers the limit of short micro-batches after a late one. Raises it after a micro-batch in time that used at
        least half of the limit."""
        wanted_s = _SHARED_MICRO_BATCH_S[self.device_type]
        if seconds > _LATE * wanted_s:
            self._most_short = max(_MIN_TOKENS[self.device_type], num_tokens * wanted_s / seconds)
        elif num_tokens >= self._most_short / 2:
            self._most_short *= 2

    def tokens_in(self, seconds: float) -> int:
        """Expected number of tokens, without custom losses, that are computed in `seconds`; 0 before the first
        measurement."""
        without = self._token_seconds - self._loss_seconds
        return round(seconds * self._tokens / without) if without > 0 else 0

    def loss_tokens(self, expected_seconds: float) -> int:
        """Number of tokens that take as long as a custom loss. Times of earlier losses correct the expected time."""
        known = self._expected_loss_seconds > 0 < self._loss_seconds
        return self.tokens_in(expected_seconds * (self._loss_seconds / self._expected_loss_seconds if known else 1.0))

    def seconds(self, *, num_tokens: int, num_calls: int) -> float | None:
        """Expected time of `num_tokens` tokens in micro-batches and of `num_calls` calls, in seconds; None when it is
        not known yet."""
        if (num_tokens and not self._tokens) or (num_calls and not self._calls):
            return None
        batches = num_tokens * self._token_seconds / self._tokens if num_tokens else 0.0
        return batches + (num_calls * self._call_seconds / self._calls if num_calls else 0.0)
