"""How the work on a micro-batch is divided: one process computes all, or several ranks share it (ranks/team.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from torch import Tensor

from trainer_service.engine.batch import Example

T = TypeVar("T")


class Team(Protocol):
    """The ranks that compute together, as the engine sees them.

    Every rank makes the same calls in the same order, whatever its share is. An error on one rank is raised on all, so
    that all continue in the same way.
    """

    @property
    def num_shares(self) -> int: ...

    @property
    def is_first(self) -> bool:
        """True on the rank that holds what exists only once, such as gradients that have been summed over the ranks."""
        ...

    @property
    def sees_all(self) -> bool:
        """False when the cause of a failed pass may be known to another rank only."""
        ...

    def shares(self, examples: Sequence[Example]) -> Sequence[Sequence[Example]]:
        """Divides the datums among the ranks. Each share keeps their order; a share may be empty."""
        ...

    def mine(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The share of this rank."""
        ...

    def one_pass(self) -> AbstractContextManager[None]:
        """A context for one forward and backward pass. If it ends without an error, all ranks may keep the results."""
        ...

    def halfway(self) -> None:
        """Called within a pass, between the losses and the backward pass."""
        ...

    def all_or_none(self, call: Callable[[], T]) -> T:
        """Makes a call that may fail on some ranks, and raises on all ranks when it fails on one."""
        ...

    def sum_(self, tensor: Tensor) -> None:
        """Sums a tensor over the ranks, in place. Every rank gets the same bits."""
        ...


class Alone:
    """A Team of one."""

    num_shares = 1
    is_first = True
    sees_all = True

    def shares(self, examples: Sequence[Example]) -> Sequence[Sequence[Example]]:
        return [examples]

    def mine(self, examples: Sequence[Example]) -> Sequence[Example]:
        return examples

    def one_pass(self) -> AbstractContextManager[None]:
        return nullcontext()

    def halfway(self) -> None:
        pass

    def all_or_none(self, call: Callable[[], T]) -> T:
        return call()

    def sum_(self, tensor: Tensor) -> None:
        pass
