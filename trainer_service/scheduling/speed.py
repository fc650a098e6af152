"""How fast the compute thread is, measured in its own works: micro-batches, and calls of another kind."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_KEPT = 0.9
"""Share of what was measured before that the newest call leaves."""
_MIN_TOKENS = 256
"""Matrix products of fewer rows are slow for each of them: cutting further would cost everybody."""
_LARGE_KEPT = 5
_LARGE_S = 0.05
"""A micro-batch that would take so long at the speed of large ones is one of them."""


@dataclass(slots=True)
class Speed:
    """Moving averages. Micro-batches weigh by their tokens: many small ones do not hide how fast a large one is."""

    _tokens: float = 0.0
    _token_seconds: float = 0.0
    _loss_seconds: float = 0.0
    """The part of them that custom losses took."""
    _expected_loss_seconds: float = 0.0
    """Time that was expected for custom losses."""
    _calls: float = 0.0
    _call_seconds: float = 0.0
    _large: deque[float] = field(default_factory=lambda: deque(maxlen=_LARGE_KEPT))
    """Tokens per second of the newest large micro-batches."""

    @property
    def large_tokens_per_s(self) -> float:
        """Median of the newest large micro-batches, so that one that something disturbed says nothing; 0 before the
        first."""
        return median(self._large) if self._large else 0.0

    def tokens_of(self, seconds: float) -> int:
        """Tokens of a micro-batch that takes so long, as far as that is known; at least 256."""
        return max(_MIN_TOKENS, round(self.large_tokens_per_s * seconds))

    def observe(
        self, seconds: float, *, num_tokens: int, loss_seconds: float = 0.0, expected_loss_seconds: float = 0.0
    ) -> None:
        """Notes the time of a micro-batch of so many tokens, or of a call when there are none. `loss_seconds`: the part
        that custom losses took."""
        if num_tokens:
            self._note_large(num_tokens, seconds - min(loss_seconds, 0.999 * seconds))
            self._tokens = _KEPT * self._tokens + num_tokens
            self._token_seconds = _KEPT * self._token_seconds + seconds
            # Those of several ranks run at once, and may be longer together than the micro-batch.
            self._loss_seconds = _KEPT * self._loss_seconds + min(loss_seconds, 0.999 * seconds)
            self._expected_loss_seconds = _KEPT * self._expected_loss_seconds + expected_loss_seconds
        else:
            self._calls = _KEPT * self._calls + 1
            self._call_seconds = _KEPT * self._call_seconds + seconds

    def _note_large(self, num_tokens: int, seconds: float) -> None:
        """A small micro-batch takes longer for each token, and says nothing about large ones."""
        if num_tokens >= self.large_tokens_per_s * _LARGE_S:
            self._large.append(num_tokens / seconds)

    def tokens_in(self, seconds: float) -> int:
        """Tokens that micro-batches without custom losses have in so many seconds, as far as that is known."""
        without = self._token_seconds - self._loss_seconds
        return round(seconds * self._tokens / without) if without > 0 else 0

    def loss_tokens(self, expected_seconds: float) -> int:
        """Tokens that are computed in the time of a custom loss. Earlier losses correct the expected time."""
        known = self._expected_loss_seconds > 0 < self._loss_seconds
        return self.tokens_in(expected_seconds * (self._loss_seconds / self._expected_loss_seconds if known else 1.0))

    def seconds(self, *, num_tokens: int, num_calls: int) -> float | None:
        """Expected time of so many tokens in micro-batches and of so many calls; None when one is not known yet."""
        if (num_tokens and not self._tokens) or (num_calls and not self._calls):
            return None
        batches = num_tokens * self._token_seconds / self._tokens if num_tokens else 0.0
        return batches + (num_calls * self._call_seconds / self._calls if num_calls else 0.0)
