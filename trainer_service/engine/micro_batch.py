"""Datums on their way into micro-batches: which go together, and how what did not fit is taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainer_service.engine.batch import Datum
from trainer_service.engine.job import Job


@dataclass(frozen=True, slots=True)
class Item:
    """A datum of a job."""

    job: Job
    index: int

    @property
    def datum(self) -> Datum:
        return self.job.batch.datums[self.index]

    @property
    def model_id(self) -> str:
        return self.job.model_id


@dataclass(slots=True)
class Attempt:
    """What running one micro-batch has taught about memory."""

    failed_tokens: int | None = None
    """Of the largest part that ran out of memory; None when none did."""
    fitting_tokens: int = 0
    """Of the largest part that went through after one had not."""
    checkpointed_tokens: int | None = None
    """Of the shortest datum that went through with activation checkpointing only."""
    gave_up: bool = False
    """A datum found no memory even alone: what it asks for is no matter of tokens."""

    def ran_out(self, tokens: int) -> None:
        self.failed_tokens = max(tokens, self.failed_tokens or 0)

    def succeeded(self, tokens: int) -> None:
        if self.failed_tokens is not None:
            self.fitting_tokens = max(tokens, self.fitting_tokens)

    def needed_checkpointing(self, tokens: int) -> None:
        self.checkpointed_tokens = min(tokens, self.checkpointed_tokens or tokens)


def num_tokens(items: Iterable[Item]) -> int:
    return sum(item.datum.charge for item in items)


def model_ids(items: Iterable[Item]) -> list[str]:
    """Each once, in order."""
    return list(dict.fromkeys(item.model_id for item in items))


def cut(
    items: Iterable[Item], token_budget: Callable[[], int], go_together: Callable[[Sequence[str]], bool]
) -> Iterator[list[Item]]:
    """Cuts at the token budget, as it is at that moment, and where a model more would be too many.

    A datum that is longer than the budget goes alone.
    """
    batch: list[Item] = []
    tokens = 0
    for item in items:
        too_long = tokens + item.datum.charge > token_budget()
        if batch and (too_long or not _may_join(item, batch, go_together)):
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += item.datum.charge
    if batch:
        yield batch


def _may_join(item: Item, batch: Sequence[Item], go_together: Callable[[Sequence[str]], bool]) -> bool:
    return item.model_id == batch[-1].model_id or go_together(model_ids([*batch, item]))


def halves(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """Two parts of about as many tokens, of at least one datum each."""
    total, before = num_tokens(items), 0
    for n, item in enumerate(items):
        before += item.datum.charge
        if 2 * before >= total:
            middle = min(max(1, n + 1), len(items) - 1)
            return items[:middle], items[middle:]
    raise ValueError("a single datum has no halves")
