"""How a micro-batch's datums are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Numbers of the datums of each share, in their order; the shares have about as many tokens.

    Longest first, each to the share that has least (Graham 1969): the largest share has at most 4/3 of what the best
    division's has. The same lengths give the same shares.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += lengths[number]
    return [sorted(share) for share in shares]
