"""Lays sequences end to end so that a beginning which several of them share occurs only once.

The sequences become a forest of segments. A segment continues the sequence where its parent ends. The segments lie in
depth-first order, so all rows beneath a segment follow directly after it, and each of these rows sees all rows of the
segment.

Shapes: N tokens of all sequences, T rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[Any]
"""A sequence as integers of any type, one for each token. Equal integers mean equal tokens."""

LEAST_SAVED = 32
"""Fewest tokens that a shared segment must save. Each segment costs a call of attention in every layer, which takes
about as long as 16 tokens do (benchmarks/LOG.md)."""
_DEEPEST = 200
"""Most levels of common beginnings of a sequence that are considered. Tokens beyond them are not shared."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Rows in which the tokens of some sequences lie."""

    lengths: Sequence[int]
    """Rows of each segment."""
    below: Sequence[int]
    """Number of rows beneath each segment."""
    sources_T: Ints
    """For each row, the number of one of the tokens that lie there. Tokens are numbered through all sequences."""
    rows_N: Ints
    """The row of each token."""


def forest_of(groups: Sequence[Sequence[Tokens]], *, least_saved: int = LEAST_SAVED) -> Forest | None:
    """The forest of some groups of sequences. The groups keep their order, and share no rows with each other.

    `least_saved`: fewest tokens that a shared segment must save. Returns None if there is no such segment.
    """
    builder = _ForestBuilder(sum(len(tokens) for group in groups for tokens in group), least_saved)
    start = 0
    for group in groups:
        builder.add(group, start)
        start += sum(map(len, group))
    if builder.num_rows == start:
        return None
    return Forest(builder.lengths, builder.below, np.concatenate(builder.sources), builder.rows_N)


class _ForestBuilder:
    """Builds a forest from groups of sequences."""

    def __init__(self, num_tokens: int, least_saved: int) -> None:
        self._least_saved = least_saved
        self.num_rows = 0
        self.lengths: list[int] = []
        self.below: list[int] = []
        self.sources: list[Ints] = []
        self.rows_N = np.empty(num_tokens, np.int64)

    def add(self, group: Sequence[Tokens], start: int) -> None:
        """Adds a group, whose first token has the number `start`."""
        starts = start + np.cumsum([0, *map(len, group)])
        order = sorted(range(len(group)), key=lambda n: group[n].tobytes())  # equal beginnings are neighbours then
        ordered = [group[n] for n in order]
        self._starts = [int(starts[n]) for n in order]
        self._lengths = [len(tokens) for tokens in ordered]
        self._common = [0, *map(num_common, ordered, ordered[1:])]
        """Number of tokens that each sequence shares with the one before it."""
        self._grow(0, len(group), depth=0, common=0, level=0)

    def _grow(self, first: int, stop: int, *, depth: int, common: int, level: int) -> None:
        """Lays the sequences from `first` to `stop`, which have `common` tokens in common. The first `depth` of these
        tokens are laid already."""
        parts = list(self._divided(first, stop, common=common if level < _DEEPEST else sys.maxsize))
        parts.sort(key=lambda part: self._lengths[part[0]])  # equal lengths lie together: attention batches them
        for begin, end in parts:
            if end - begin == 1:
                self._lay(begin, end, depth, self._lengths[begin])
                continue
            more = min(self._common[begin + 1 : end])
            if (end - begin - 1) * (more - depth) < self._least_saved:
                self._grow(begin, end, depth=depth, common=more, level=level + 1)
                continue
            segment = len(self.lengths)
            self._lay(begin, end, depth, more)
            rows = self.num_rows
            self._grow(begin, end, depth=more, common=more, level=level + 1)
            self.below[segment] = self.num_rows - rows

    def _divided(self, first: int, stop: int, *, common: int) -> Iterator[tuple[int, int]]:
        """Ranges of sequences that have more than `common` tokens in common, and single sequences."""
        begin = first
        for n in range(first + 1, stop + 1):
            if n == stop or self._common[n] <= common:
                yield begin, n
                begin = n

    def _lay(self, begin: int, end: int, depth: int, until: int) -> None:
        """Lays the tokens from `depth` to `until`, once for these sequences."""
        if depth == until:
            return
        rows = np.arange(self.num_rows, self.num_rows + until - depth)
        for n in range(begin, end):
            self.rows_N[self._starts[n] + depth : self._starts[n] + until] = rows
        self.sources.append(np.arange(self._starts[begin] + depth, self._starts[begin] + until))
        self.lengths.append(until - depth)
        self.below.append(0)
        self.num_rows += until - depth


def num_common(one: Tokens, other: Tokens) -> int:
    """The number of tokens with which both sequences begin."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length
