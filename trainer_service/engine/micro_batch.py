"""How datums are cut into micro-batches, and how a micro-batch that did not fit into memory is halved."""

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
    """Observations about memory while one micro-batch and its parts ran."""

    failed_tokens: int | None = None
    """Tokens of the largest part that ran out of memory; None when none did."""
    fitting_tokens: int = 0
    """Tokens of the largest part that ran after another had run out of memory."""
    checkpointed_tokens: int | None = None
    """Tokens of the shortest datum that ran only with activation checkpointing; None when none needed it."""
    gave_up: bool = False
    """True when a datum ran out of memory even alone, so the number of tokens is not the cause."""

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
    """The items' models, each once, in the items' order."""
    return list(dict.fromkeys(item.model_id for item in items))


def cut(
    items: Iterable[Item], token_budget: Callable[[], int], go_together: Callable[[Sequence[str]], bool]
) -> Iterator[list[Item]]:
    """Cuts items into micro-batches, in order. A new one begins where an item would exceed the token budget, which is
    read for each item, or where its model may not join the others (`go_together`).

    A datum longer than the budget is a micro-batch by itself.
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
    """Two parts with about equally many tokens, each with at least one datum. Raises ValueError for a single item."""
    total, before = num_tokens(items), 0
    for n, item in enumerate(items):
        before += item.datum.charge
        if 2 * before >= total:
            middle = min(max(1, n + 1), len(items) - 1)
            return items[:middle], items[middle:]
    raise ValueError("a single datum has no halves")
