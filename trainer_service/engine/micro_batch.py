"""How datums are cut into micro-batches, and how a micro-batch that did not fit into memory is halved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainer_service.engine.batch import Example


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


def num_tokens(examples: Iterable[Example]) -> int:
    return sum(example.datum.charge for example in examples)


def model_ids(examples: Iterable[Example]) -> list[str]:
    """The examples' models, each once, in the examples' order."""
    return list(dict.fromkeys(example.model_id for example in examples))


def cut(
    examples: Iterable[Example], token_budget: Callable[[], int], go_together: Callable[[Sequence[str]], bool]
) -> Iterator[list[Example]]:
    """Cuts examples into micro-batches, in order. A new one begins where an example would exceed the token budget,
    which is read for each example, or where its model may not join the others (`go_together`).

    A datum longer than the budget is a micro-batch by itself.
    """
    batch: list[Example] = []
    tokens = 0
    for example in examples:
        too_long = tokens + example.datum.charge > token_budget()
        if batch and (too_long or not _may_join(example, batch, go_together)):
            yield batch
            batch, tokens = [], 0
        batch.append(example)
        tokens += example.datum.charge
    if batch:
        yield batch


def _may_join(example: Example, batch: Sequence[Example], go_together: Callable[[Sequence[str]], bool]) -> bool:
    return example.model_id == batch[-1].model_id or go_together(model_ids([*batch, example]))


def halves(examples: Sequence[Example]) -> tuple[Sequence[Example], Sequence[Example]]:
    """Two parts with about equally many tokens, each with at least one datum. Raises ValueError for one example."""
    total, before = num_tokens(examples), 0
    for n, example in enumerate(examples):
        before += example.datum.charge
        if 2 * before >= total:
            middle = min(max(1, n + 1), len(examples) - 1)
            return examples[:middle], examples[middle:]
    raise ValueError("a single datum has no halves")
