"""How a micro-batch's datums are divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_TRIED = 4
"""Most divisions of groups, as a multiple of the number of shares."""


def balanced(charges: Sequence[int], saved: Sequence[int], num_shares: int) -> list[list[int]]:
    """Divides datums into shares of about equally many tokens to compute. Returns the indices of each share, sorted.

    `charges`: tokens of each datum computed alone. `saved`: tokens that it need not compute in the share of the datum
    before it. More than 0 makes the two members of one group.

    Every rank that has a part of a group computes the group's common beginning. So groups are whole at first. Then,
    again and again, the group with the largest part is divided into one part more. Each time the parts, the largest
    first, go to the share that has least (Graham 1969: the largest share is at most 4/3 of the largest share in the
    best division of these parts). The division whose largest share is smallest wins, because ranks wait for each other.
    Among equal divisions, the one with the fewest tokens in all wins. The result depends on the arguments only, so
    every rank gets the same.
    """
    groups = [_Group(charges, saved, numbers) for numbers in _groups(saved)]
    best = _divided(groups, num_shares)
    for _ in range(_TRIED * num_shares if num_shares > 1 else 0):
        largest = max(groups, key=lambda group: group.parts[0][0] if group.can_be_divided else 0, default=None)
        if largest is None or not largest.can_be_divided:
            break
        largest.divide(largest.num_parts + 1)
        best = min(best, _divided(groups, num_shares), key=_cost)
    for group in groups:
        group.divide(len(group.numbers))
    _, shares = min(best, _divided(groups, num_shares), key=_cost)
    return [sorted(share) for share in shares]


def _groups(saved: Sequence[int]) -> Iterator[range]:
    starts = [number for number, less in enumerate(saved) if not less or not number]
    for start, stop in zip(starts, [*starts[1:], len(saved)], strict=False):
        yield range(start, stop)


class _Group:
    """Datums, in one or several parts. Each datum begins like the datum before it."""

    def __init__(self, charges: Sequence[int], saved: Sequence[int], numbers: range) -> None:
        self.numbers = numbers
        self._charges = charges
        self._saved = saved
        self.divide(1)

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def can_be_divided(self) -> bool:
        return self.num_parts < len(self.numbers)

    def divide(self, num_parts: int) -> None:
        """Makes that many parts of about equally many datums. Each is a pair: the tokens that it computes, and its
        datums' numbers; the largest comes first."""
        size, rest = divmod(len(self.numbers), num_parts)
        stops = [(n + 1) * size + min(n + 1, rest) for n in range(num_parts)]
        parts = [self.numbers[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        self.parts = sorted(((self._load(part), part) for part in parts), key=lambda part: -part[0])

    def _load(self, part: range) -> int:
        return sum(self._charges[n] for n in part) - sum(self._saved[n] for n in part[1:])


_Division = tuple[list[int], list[list[int]]]
"""The tokens and the indices of each share."""


def _divided(groups: Sequence[_Group], num_shares: int) -> _Division:
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    parts = [part for group in groups for part in group.parts]
    for load, numbers in sorted(parts, key=lambda part: -part[0]):  # stable: equal ones stay in their order
        least = loads.index(min(loads))
        shares[least] += numbers
        loads[least] += load
    return loads, shares


def _cost(division: _Division) -> tuple[int, int]:
    loads, _ = division
    return max(loads), sum(loads)
