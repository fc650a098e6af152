"""How a micro-batch's datums are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Divides datums of these lengths into shares of about equally many tokens. Returns the indices of each share,
    sorted.

    Each datum, the longest first, goes to the share that has least (Graham 1969). The largest share is at most 4/3 of
    that of the best division. The result depends on the lengths only, so every rank gets the same.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += lengths[number]
    return [sorted(share) for share in shares]
