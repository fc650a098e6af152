"""The measured speed of the compute thread: of its micro-batches, and of its calls."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_KEPT = 0.9
"""Weight of the earlier measurements in a moving average when a new one is added."""
_MIN_TOKENS = 256
"""Smallest token limit of a micro-batch. Matrix products of fewer rows take longer per row."""
_LARGE_KEPT = 5
"""Number of large micro-batches whose median is the speed."""
_LARGE_S = 0.05
"""A micro-batch counts as large when it would take at least this long at the speed of large ones, in seconds."""


@dataclass(slots=True)
class Speed:
    """Moving averages of measured times. Micro-batches are weighted by their tokens, so that many small ones do not
    hide how fast a large one is."""

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

    @property
    def large_tokens_per_s(self) -> float:
        """Median speed of the newest large micro-batches, so that a single disturbed one does not count; 0 before the
        first."""
        return median(self._large) if self._large else 0.0

    def tokens_of(self, seconds: float) -> int:
        """Expected number of tokens of a micro-batch that takes `seconds`; at least _MIN_TOKENS."""
        return max(_MIN_TOKENS, round(self.large_tokens_per_s * seconds))

    def observe(
        self, seconds: float, *, num_tokens: int, loss_seconds: float = 0.0, expected_loss_seconds: float = 0.0
    ) -> None:
        """Records the time of a micro-batch of `num_tokens` tokens; 0 tokens mean a call. `loss_seconds`: the part that
        custom losses took. `expected_loss_seconds`: the part that they were expected to take."""
        if num_tokens:
            self._note_large(num_tokens, seconds - min(loss_seconds, 0.999 * seconds))
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
