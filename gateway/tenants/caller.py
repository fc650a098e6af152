"""The caller of a request, as authentication hands it on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, or anyone when the server has no keys."""

    owner: str
    key_id: str = ""
    """A prefix of the key's hash, so it does not depend on the order of keys; empty when any key is accepted."""
    name: str = ""
    note: str = ""
    email: str = ""
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    key_hash: str = field(default="", repr=False)
    """Hash of a key of the database; empty for a key of the configuration."""

    @property
    def number(self) -> int:
        """The key's id for the public API."""
        return int(self.key_id, 16) if self.key_id else 0

    def sees(self, owner: str) -> bool:
        """Whether the caller has access to things of `owner`: the one rule that all access checks use."""
        return self.admin or owner == self.owner

    @property
    def cache_salt(self) -> str:
        """Keeps an owner's prompts apart from others' in the samplers' caches; empty when any key is accepted."""
        return hashlib.sha256(self.owner.encode()).hexdigest()[:32] if self.key_id else ""
