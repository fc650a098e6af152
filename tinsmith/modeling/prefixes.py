"""Lays sequences end to end, with a beginning that several of them share only once.

The sequences become a forest of segments. A segment goes on where its parent ends. The segments lie in depth-first
order, so all rows beneath a segment come directly behind it, and each of them sees all of its rows.

Shapes: N tokens of all sequences, T rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[Any]
"""Numbers of a sequence's tokens, of any integer type. Equal numbers mean equal tokens."""

SHORTEST = 32
"""Fewest tokens of a shared segment. Each costs a call of attention in every layer."""
_DEEPEST = 200
"""Most shared segments in a sequence. Further tokens are not shared."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Where the tokens of some sequences lie."""

    lengths: Sequence[int]
    """Rows of each segment."""
    below: Sequence[int]
    """Number of rows beneath each segment."""
    sources_T: Ints
    """For each row, the number of a token that lies there. The tokens are numbered through all sequences."""
    rows_N: Ints
    """The row of each token."""


def forest_of(groups: Sequence[Sequence[Tokens]], *, shortest: int = SHORTEST) -> Forest | None:
    """The forest of some groups of sequences. Groups lie in their order, and share nothing with each other.

    Returns None if no two sequences of a group share `shortest` tokens.
    """
    growing = _Growing(sum(len(tokens) for group in groups for tokens in group), shortest)
    start = 0
    for group in groups:
        growing.add(group, start)
        start += sum(map(len, group))
    if not any(growing.below) and growing.num_rows == start:
        return None
    return Forest(growing.lengths, growing.below, np.concatenate(growing.sources), growing.rows_N)


class _Growing:
    """A forest to which groups of sequences are added."""

    def __init__(self, num_tokens: int, shortest: int) -> None:
        self._shortest = shortest
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
        self._common = [0, *map(_num_common, ordered, ordered[1:])]
        """Number of tokens that each sequence shares with the one before it."""
        self._grow(0, len(group), depth=0, level=0)

    def _grow(self, first: int, stop: int, *, depth: int, level: int) -> None:
        """Lays the sequences from `first` to `stop`, of which the first `depth` tokens are laid."""
        parts = list(self._divided(first, stop, depth=depth, level=level))
        parts.sort(key=lambda part: self._lengths[part[0]])  # equal lengths lie together: attention batches them
        for begin, end in parts:
            if end - begin == 1:
                self._lay(begin, end, depth, self._lengths[begin])
                continue
            common = min(self._common[begin + 1 : end])
            segment = len(self.lengths)
            self._lay(begin, end, depth, common)
            rows = self.num_rows
            self._grow(begin, end, depth=common, level=level + 1)
            self.below[segment] = self.num_rows - rows

    def _divided(self, first: int, stop: int, *, depth: int, level: int) -> Iterator[tuple[int, int]]:
        """Ranges of sequences that share another segment, and single sequences."""
        begin = first
        for n in range(first + 1, stop + 1):
            if n == stop or level == _DEEPEST or self._common[n] - depth < self._shortest:
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


def _num_common(one: Tokens, other: Tokens) -> int:
    """The number of tokens with which both sequences begin."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length
