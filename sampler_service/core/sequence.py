"""One sequence that is generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

HEADROOM = 256
"""Output tokens that a sequence without max_tokens reserves at first."""

PASSING = 4
"""Sequences that may run beyond max_running, for prompts that stay for one step."""


@dataclass(slots=True, eq=False)
class Sequence(Generic[Owner]):
    """One of the num_samples of a request."""

    owner: Owner
    index: int
    prompt_length: int
    max_length: int
    """Prompt and output."""
    bounded: bool
    """Whether the request said max_tokens."""
    order: int
    """Grows with submission."""
    reserved: int = 0
    """Cached tokens that it may use without asking."""
    size: int = 0
    """Which cache has its lane (planner.py), once tokens are reserved for it."""
    lane: int = 0
    """Lane of that cache, while it runs."""
    origin: object = None
    """Identity of the prompt that its cached tokens began with. Sequences of one origin share it."""
    shared_length: int = 0
    """Tokens of that prompt."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.tokens)

    @property
    def need(self) -> int:
        """Cached tokens to reserve when it is admitted."""
        return self.max_length if self.bounded else min(self.max_length, self.length + HEADROOM)

    @property
    def promised(self) -> int:
        """Cached tokens that it has or will get."""
        return self.reserved or self.need

    @property
    def passes(self) -> bool:
        """Whether it ends with the token that its prompt gives."""
        return self.max_length <= self.length + 1

    @property
    def expected(self) -> int:
        """Most tokens that it may draw. Without max_tokens it counts as the tokens that it reserves at first."""
        most = self.max_length - self.prompt_length
        return most if self.bounded else min(most, HEADROOM)

    @property
    def expected_left(self) -> int:
        """Most tokens that it may still draw; never more than `expected`."""
        return min(self.max_length - self.length, self.expected)
