"""Answers that clients may ask for again, kept in memory up to a number of bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
_OVERHEAD_BYTES = 1024
"""Memory of an answer beside its body, about."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a future, as retrieve_future sends it."""

    body: bytes
    media_type: str = JSON
    as_json: Callable[[bytes], bytes] | None = None
    """Converts a protobuf body to JSON, for clients that do not accept protobuf."""
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer in memory."""

    owner: str
    answer: Answer
    fingerprint: str | None
    """Hash of the request; None when only the request id is known."""

    @property
    def num_bytes(self) -> int:
        return len(self.answer.body) + _OVERHEAD_BYTES


class Answers:
    """Keeps answers by request id, up to `max_bytes`.

    Above the bound, the owner whose answers take most memory loses the least recently used one. So no owner loses an
    answer to one who has more. The newest answer is always kept, even above the bound, because its client may not have
    it yet.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, Kept] = {}
        self._ids: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """owner -> request ids, the least recently used first."""
        self._bytes: Counter[str] = Counter()
        """owner -> bytes of the kept answers."""
        self._num_bytes = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def get(self, request_id: str) -> Kept | None:
        return self._kept.get(request_id)

    def use(self, request_id: str) -> None:
        self._ids[self._kept[request_id].owner].move_to_end(request_id)

    def put(self, request_id: str, kept: Kept) -> None:
        self.forget(request_id)
        self._kept[request_id] = kept
        self._ids[kept.owner][request_id] = None
        self._count(kept.owner, kept.num_bytes)
        while self._num_bytes > self._max_bytes:
            largest = [owner for owner, _ in self._bytes.most_common(2)]
            oldest = next(iter(self._ids[largest[0]]))
            if oldest == request_id:
                if self._num_bytes - kept.num_bytes <= self._max_bytes:
                    return
                oldest = next(iter(self._ids[largest[1]]))
            self.forget(oldest)

    def forget(self, request_id: str) -> None:
        if (kept := self._kept.pop(request_id, None)) is not None:
            del self._ids[kept.owner][request_id]
            self._count(kept.owner, -kept.num_bytes)

    def _count(self, owner: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bytes[owner] += num_bytes
        if not self._ids[owner]:
            del self._ids[owner], self._bytes[owner]
