"""Lanes and cached tokens that each owner holds, and how many are one share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from sampler_service.core.sequence import Sequence


def owner_of(sequence: Sequence) -> str:
    return sequence.group.request.owner


class Shares:
    """The shares of owners who run or wait: equal parts of the lanes and of the cache's tokens. A share is at least one
    lane."""

    def __init__(self, owners: Collection[str], *, max_lanes: int, max_tokens: int) -> None:
        self._max_lanes = max_lanes
        self._max_tokens = max_tokens
        self._lanes = max(1, max_lanes // len(owners))
        """Lanes of one share."""
        self._tokens = max_tokens // len(owners)
        """Tokens of one share."""
        self._held_lanes = Counter[str]()
        self._held_tokens = Counter[str]()

    def hold(self, owner: str, *, lanes: int, tokens: int) -> None:
        """Counts `lanes` lanes of `tokens` tokens each as held by the owner. A negative number means that the owner
        gives lanes back."""
        self._held_lanes[owner] += lanes
        self._held_tokens[owner] += lanes * tokens

    def lanes_left(self, owner: str, *, tokens: int) -> int:
        """Number of lanes of `tokens` tokens each for which the owner's share has room. An owner who holds nothing may
        have one lane in any case."""
        if not self._held_lanes[owner]:
            return max(1, min(self._lanes, self._tokens // tokens))
        return min(self._lanes - self._held_lanes[owner], (self._tokens - self._held_tokens[owner]) // tokens)

    def greediest(self) -> str | None:
        """The owner who holds most. None if that owner holds no more than a share, or only one lane."""
        above = [
            owner
            for owner, lanes in self._held_lanes.items()
            if lanes > 1 and (lanes > self._lanes or self._held_tokens[owner] > self._tokens)
        ]
        return max(above, key=self._part, default=None)

    def _part(self, owner: str) -> float:
        """The owner's part of all lanes or of all tokens, whichever is larger (dominant resource fairness, Ghodsi et
        al., 2011)."""
        return max(self._held_lanes[owner] / self._max_lanes, self._held_tokens[owner] / self._max_tokens)
