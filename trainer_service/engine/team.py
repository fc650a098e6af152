"""Who computes a micro-batch: this process alone, or several ranks together (trainer_service/ranks)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from torch import Tensor

from trainer_service.engine.micro_batch import Item

T = TypeVar("T")


class Team(Protocol):
    """What the engine asks of it. Every rank makes the same calls in the same order, whatever its share is.

    An error of one rank is raised on all of them, so that they go on in the same way.
    """

    @property
    def num_shares(self) -> int: ...

    @property
    def is_first(self) -> bool:
        """True on the rank that holds what exists once, such as gradients that have been added up."""
        ...

    @property
    def sees_all(self) -> bool:
        """False when what made a pass fail may be known to another rank only."""
        ...

    def shares(self, items: Sequence[Item]) -> Sequence[Sequence[Item]]:
        """The datums divided, each share in the given order. Some may be empty."""
        ...

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """The share of this rank."""
        ...

    def one_pass(self) -> AbstractContextManager[None]:
        """Around a forward and backward of the base model, up to where its results may be kept."""
        ...

    def halfway(self) -> None:
        """In a pass: forward is done, and the losses are known."""
        ...

    def all_or_none(self, call: Callable[[], T]) -> T:
        """Makes a call that may fail on some ranks."""
        ...

    def sum_(self, tensor: Tensor) -> None:
        """Adds up over the ranks, in place. The result is the same on every rank, bit for bit."""
        ...


class Alone:
    """A Team of one."""

    num_shares = 1
    is_first = True
    sees_all = True

    def shares(self, items: Sequence[Item]) -> Sequence[Sequence[Item]]:
        return [items]

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        return items

    def one_pass(self) -> AbstractContextManager[None]:
        return nullcontext()

    def halfway(self) -> None:
        pass

    def all_or_none(self, call: Callable[[], T]) -> T:
        return call()

    def sum_(self, tensor: Tensor) -> None:
        pass
