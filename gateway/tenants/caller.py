"""The holder of a key, as everything behind the authentication sees it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key."""

    owner: str
    key_id: str = ""
    """The same at every start, wherever the key stands in the list; empty when any key is accepted."""
    name: str = ""
    note: str = ""
    email: str = ""
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    key_hash: str = field(default="", repr=False)
    """Of a key of the database."""

    @property
    def number(self) -> int:
        """The key's id for the public API."""
        return int(self.key_id, 16) if self.key_id else 0

    def sees(self, owner: str) -> bool:
        """Whether what belongs to `owner` exists for this caller: the one rule of it."""
        return self.admin or owner == self.owner

    @property
    def cache_salt(self) -> str:
        """Of an owner's samples, so that they reuse nothing of other owners'; empty when any key is accepted."""
        return hashlib.sha256(self.owner.encode()).hexdigest()[:32] if self.key_id else ""
