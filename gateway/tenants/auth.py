"""The callers: each needs a key, or a JWT that was issued for one (tokens.py).

Keys come from the configuration and from the database (keys.py). The keys of the database are held in memory and read
again every REFRESH_S. So a request costs no query, and every gateway behind the database notices a new or revoked key
within seconds. Anyone may call while there is no key at all. As soon as the database has one, even a revoked one, a key
is required.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from sqlalchemy.exc import SQLAlchemyError

from gateway.database.tables.tenants import StoredKey
from gateway.database.write_behind import WriteBehind
from gateway.tenants.access import Caller
from gateway.tenants.keys import Keys, hash_of, id_of, is_active
from tinsmith.rpc.auth import ApiKey, KeyRing

logger = logging.getLogger(__name__)

LOCAL = "local"
"""Owner of everything when any key is accepted."""
REFRESH_S = 2.0
"""Pause between two readings of the database's keys, in seconds."""
USED_S = 60.0
"""Pause between two writes of the times at which keys were last used, in seconds."""

_MISS_S = 0.25
"""Shortest time between two readings because of unknown keys, in seconds, so that guessing keys does not load the
database."""


def owner_of(key: str) -> str:
    """A name for the holder of a key, which does not reveal the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


_ANYONE = Caller(LOCAL, "", "any key", "this server accepts any key, from its own machine only", admin=True)


def _stored(row: StoredKey) -> Caller:
    return Caller(
        row.owner,
        id_of(row.key_hash),
        row.name or id_of(row.key_hash),
        row.note,
        row.email,
        row.admin,
        row.requests_per_minute,
        row.tokens_per_minute,
        row.key_hash,
    )


class Callers:
    """All callers that have a key, from the configuration and the database. Without any key, everyone is a caller."""

    def __init__(self, keys: Sequence[ApiKey], stored: Keys, *, also_read: Callable[[], Awaitable[None]]) -> None:
        """`also_read`: reads the budgets. It is called whenever keys are read, so that the holder of a new key cannot
        call before the budget is known."""
        self._ring = KeyRing(key.key.get_secret_value() for key in keys)
        self._configured: list[Caller] = []
        self._keys = stored
        self._also_read = also_read
        self._rows: dict[str, StoredKey] = {}
        """Hash -> row of a key that is not revoked."""
        self._hashes: dict[str, str] = {}
        """key_id -> hash of a key that is not revoked."""
        self._has_rows = False
        self._read_at = 0.0
        self._used: dict[str, float] = {}
        self.uses = WriteBehind(self._write_uses, what="times at which keys were last used", every_s=USED_S)
        self._reading = asyncio.Lock()
        for position, key in enumerate(keys):
            text = key.key.get_secret_value()
            self._configured.append(
                Caller(
                    key.owner or owner_of(text),
                    id_of(hash_of(text)),
                    key.name or f"api_keys[{position}]",
                    key.note,
                    key.email,
                    key.admin,
                    key.requests_per_minute,
                    key.tokens_per_minute,
                )
            )

    @property
    def anyone(self) -> bool:
        """Whether anyone may call, because there is no key."""
        return not self._configured and not self._has_rows

    async def find(self, key: str) -> Caller | None:
        """The caller with this key. Asks the database when the key is not in memory."""
        if (caller := self.by_key(key)) is not None:
            return caller
        await self._read_news()
        return self.by_key(key)

    async def find_id(self, key_id: str) -> Caller | None:
        """The caller whose key has this id. Asks the database when the id is not in memory."""
        if (caller := self.by_id(key_id)) is not None:
            return caller
        await self._read_news()
        return self.by_id(key_id)

    async def _read_news(self) -> None:
        """Reads the keys again, at most every `_MISS_S`."""
        asked_at = time.monotonic()
        await asyncio.sleep(max(0.0, self._read_at + _MISS_S - asked_at))
        await self.refresh(since=asked_at)

    def by_key(self, key: str) -> Caller | None:
        if self.anyone:
            return _ANYONE
        if (position := self._ring.find(key)) is not None:
            return self._configured[position]
        # The time of a dictionary's look-up depends on the hash of a key, so it does not help to guess a key.
        return self._active(self._rows.get(hash_of(key)))

    def by_id(self, key_id: str) -> Caller | None:
        if self.anyone:
            return _ANYONE if key_id == _ANYONE.key_id else None
        known = (caller for caller in self._configured if caller.key_id == key_id)
        return next(known, None) or self._active(self._rows.get(self._hashes.get(key_id, "")))

    def by_owner(self, owner: str) -> Caller | None:
        """A caller with the owner's first key, for the key's name and note; None when the owner has no valid key."""
        if self.anyone:
            return _ANYONE if owner == LOCAL else None
        known = (caller for caller in self._configured if caller.owner == owner)
        rows = (_stored(row) for row in self._rows.values() if row.owner == owner and is_active(row))
        return next(known, None) or next(rows, None)

    def _active(self, row: StoredKey | None) -> Caller | None:
        if row is None or not is_active(row):
            return None
        self._used[row.key_hash] = time.time()
        return _stored(row)

    # Keys of the database

    async def read(self) -> None:
        """Reads all keys of the database. Raises SQLAlchemyError."""
        rows = await self._keys.all()
        await self._also_read()
        self._has_rows = self._has_rows or bool(rows)  # an emptied table must not open the server
        self._rows = {row.key_hash: row for row in rows if row.revoked_at is None}
        self._hashes = {id_of(key_hash): key_hash for key_hash in self._rows}
        self._read_at = time.monotonic()

    async def refresh(self, *, since: float | None = None) -> None:
        """Reads the keys again, unless they were read after `since`, a time of the monotonic clock.

        Keeps the keys that are in memory when the database cannot be read.
        """
        async with self._reading:
            if since is not None and self._read_at > since:
                return
            try:
                await self.read()
            except SQLAlchemyError as error:
                logger.warning(
                    "the keys cannot be read from the database, so the keys that were read before stay valid: %s", error
                )

    async def _write_uses(self) -> None:
        if not self._used:
            return
        used, self._used = self._used, {}
        try:
            await self._keys.used(used)
        except BaseException:
            self._used = used | self._used
            raise
