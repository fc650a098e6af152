"""Keys that the command line makes, and the budgets of their owners: rows of the database that all gateways share.

The database holds only the SHA-256 of a key, so nobody who reads the database can call with its content. A slow hash
with a salt protects passwords that people choose; for a key of 256 random bits it would only make requests slower.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, update

from gateway.database.catalog import exists_now
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.tenants import AuditEvent, Budget, StoredKey, TokenCount
from tinsmith.errors import InvalidRequest, NotFound
from tinsmith.rpc.auth import OWNER_PATTERN

PREFIX = "tml-"
"""Beginning of a key, which the SDK requires."""
ID_LENGTH = 12
"""Characters of a key's id."""
OPERATOR = "operator"
"""Name of the command line in the audit log."""
AUDIT_CATEGORY = "organizations"


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def id_of(key_hash: str) -> str:
    """The public id of a key, which does not reveal the key."""
    return key_hash[:ID_LENGTH]


def is_active(row: StoredKey) -> bool:
    return row.revoked_at is None and (row.expires_at is None or row.expires_at > time.time())


def check_owner(owner: str) -> str:
    """Returns the owner's name. Raises InvalidRequest when it is malformed."""
    if not re.fullmatch(OWNER_PATTERN, owner):
        raise InvalidRequest(
            f"owner: {owner!r} is not 1 to 64 letters, digits, '.', '_', '@' or '-', beginning with a letter or digit",
            field="owner",
        )
    return owner


@dataclass(frozen=True, slots=True)
class Account:
    """An owner's usage and budgets. A budget of None means no limit."""

    owner: str
    tokens: int
    """Tokens used since the budget began to count."""
    token_budget: int | None
    stored_bytes: int
    storage_quota: int | None


class Keys:
    """Reads and changes keys and budgets in the database."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(
        self,
        owner: str,
        *,
        name: str = "",
        note: str = "",
        email: str = "",
        admin: bool = False,
        expires_at: float | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> tuple[str, StoredKey]:
        """Makes a key. Returns the key itself, which is stored nowhere, and its row.

        Raises InvalidRequest for a malformed owner.
        """
        key = PREFIX + secrets.token_urlsafe(32)
        row = StoredKey(
            key_hash=hash_of(key),
            owner=check_owner(owner),
            name=name,
            note=note,
            email=email,
            admin=admin,
            created_at=time.time(),
            expires_at=expires_at,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )
        async with self._store.begin() as db:
            db.add(row)
            db.add(_event("key_create", row, by=OPERATOR, admin=admin, expires_at=expires_at))
        return key, row

    async def all(self) -> list[StoredKey]:
        """All keys, revoked ones too; oldest first."""
        return await self._store.all(select(StoredKey).order_by(StoredKey.created_at, StoredKey.key_hash))

    async def revoke(self, key_id: str, *, by: str = OPERATOR) -> StoredKey:
        """Revokes the key with this id; a repeat changes nothing. Raises NotFound when there is no such key."""
        is_it = StoredKey.key_hash.startswith(key_id, autoescape=True)
        async with self._store.begin() as db:
            found = list(await db.scalars(select(StoredKey).where(is_it))) if len(key_id) == ID_LENGTH else []
            if len(found) != 1:
                raise NotFound(f"there is no key with the id {key_id!r}; `tinsmith keys list` shows them")
            row = found[0]
            if row.revoked_at is None:
                row.revoked_at = time.time()
                db.add(_event("key_revoke", row, by=by))
        return row

    async def used(self, times: Mapping[str, float]) -> None:
        """Writes the times at which keys were last used. `times`: hash -> seconds since 1970."""
        async with self._store.begin() as db:
            for key_hash, at in sorted(times.items()):
                await db.execute(update(StoredKey).where(StoredKey.key_hash == key_hash).values(last_used_at=at))

    # Budgets

    async def set_budget(
        self, owner: str, limits: Mapping[str, int | None], *, restart: bool = False
    ) -> dict[str, int | None]:
        """Sets the owner's `tokens` and `storage_bytes`, and returns their values from before. None means no limit.

        A name that is not in `limits` keeps its value. With `restart`, tokens that were used before no longer count.
        Raises InvalidRequest for a malformed owner.
        """
        check_owner(owner)
        async with self._store.begin() as db:
            row = await db.get(Budget, owner)
            if row is None:
                db.add(row := Budget(owner=owner, tokens_from=0, changed_at=time.time()))
            before = {name: getattr(row, name) for name in limits}
            for name, value in limits.items():
                setattr(row, name, value)
            if restart:
                counted = select(func.sum(TokenCount.amount)).where(TokenCount.owner == owner)
                row.tokens_from = int(await db.scalar(counted) or 0)
            row.changed_at = time.time()
            db.add(
                AuditEvent(
                    at=row.changed_at,
                    owner=OPERATOR,
                    category=AUDIT_CATEGORY,
                    event="budget_change",
                    details={"owner": owner, "restarted": restart, **limits},
                )
            )
        return before

    async def budgets(self) -> dict[str, Budget]:
        return {row.owner: row for row in await self._store.all(select(Budget))}

    async def token_counts(self, owners: Sequence[str] | None = None) -> list[TokenCount]:
        """The token counts of these owners. `owners` None means all owners."""
        query = select(TokenCount)
        if owners is not None:
            query = query.where(TokenCount.owner.in_(owners))
        return await self._store.all(query)

    async def stored_bytes(self, owner: str, *, without: Collection[str] = ()) -> int:
        """Bytes of all checkpoints of the owner, except those at the paths in `without`."""
        query = select(func.sum(Checkpoint.size_bytes)).where(
            Checkpoint.owner == owner, Checkpoint.path.not_in(without), exists_now()
        )
        return int(await self._store.first(query) or 0)

    async def num_checkpoints(self, owner: str, *, without: str) -> int:
        """Number of checkpoints of the owner, except the one at the path `without`."""
        query = select(func.count()).select_from(Checkpoint)
        return await self._store.first(query.where(Checkpoint.owner == owner, Checkpoint.path != without)) or 0

    async def accounts(self) -> dict[str, Account]:
        """owner -> account, for every owner with a key, a budget or usage."""
        budgets = await self.budgets()
        tokens: dict[str, int] = {}
        for count in await self.token_counts():
            tokens[count.owner] = tokens.get(count.owner, 0) + count.amount
        owners = {row.owner for row in await self.all()} | set(budgets) | set(tokens)
        accounts = {}
        for owner in sorted(owners):
            budget = budgets.get(owner)
            accounts[owner] = Account(
                owner,
                tokens.get(owner, 0) - (budget.tokens_from if budget else 0),
                budget.tokens if budget else None,
                await self.stored_bytes(owner),
                budget.storage_bytes if budget else None,
            )
        return accounts


def _event(event: str, row: StoredKey, *, by: str, **details: Any) -> AuditEvent:
    about = {"key_id": id_of(row.key_hash), "owner": row.owner, "name": row.name, **details}
    return AuditEvent(at=time.time(), owner=by, category=AUDIT_CATEGORY, event=event, details=about)
