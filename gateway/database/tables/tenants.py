"""Who uses the service: keys, budgets, what was used, and what was done."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class StoredKey(Base):
    """A key that the command line has made. Its row stays when it is revoked."""

    __tablename__ = "api_keys"

    key_hash: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 in hexadecimal digits; the key itself is nowhere. No salt and no slow hash: a key is 256 random bits."""
    owner: Mapped[str]
    name: Mapped[str]
    note: Mapped[str]
    email: Mapped[str]
    admin: Mapped[bool]
    """Sees and changes what belongs to any owner."""
    created_at: Mapped[float]
    last_used_at: Mapped[float | None]
    """Written now and then."""
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)


class Budget(Base):
    """What an owner may use in total. Who has no row, or an empty column, may use any amount."""

    __tablename__ = "budgets"

    owner: Mapped[str] = mapped_column(primary_key=True)
    tokens: Mapped[int | None] = mapped_column(BigInteger)
    tokens_from: Mapped[int] = mapped_column(BigInteger)
    """The owner's count of tokens from which the budget counts."""
    storage_bytes: Mapped[int | None] = mapped_column(BigInteger)
    changed_at: Mapped[float]


class Usage(Base):
    """What was used in one hour: tokens, checkpoints, or byte-hours of storage."""

    __tablename__ = "usage"

    hour: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Hours since 1970, UTC."""
    owner: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(primary_key=True)
    """Empty for storage."""
    base_model: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    """training, sampling_prefill, sampling_prefill_cached, sampling_sample, checkpoint or storage."""
    amount: Mapped[int] = mapped_column(BigInteger)


class TokenCount(Base):
    """All tokens that were trained on, read or sampled: the sum of the usage of all hours."""

    __tablename__ = "token_counts"

    owner: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    """Of the key that made the session; empty for what was used before keys were counted."""
    amount: Mapped[int] = mapped_column(BigInteger)


class CountedOperation(Base):
    """A training operation whose tokens are in the usage: several gateways may see its answer, and one counts."""

    __tablename__ = "counted_operations"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    seq_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)


class LedgerBatch(Base):
    """The newest batch that a gateway's ledger has written, in the transaction that wrote it."""

    __tablename__ = "ledger_batches"

    ledger_id: Mapped[str] = mapped_column(primary_key=True)
    """Of one run of a gateway."""
    number: Mapped[int] = mapped_column(BigInteger)
    written_at: Mapped[float]


class AuditEvent(Base):
    """Something that was done to a checkpoint, a project or a key."""

    __tablename__ = "audit_events"

    event_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(index=True)
    owner: Mapped[str]
    """Who did it."""
    category: Mapped[str]
    """checkpoints, projects, teams or organizations."""
    event: Mapped[str]
    """Such as checkpoint_delete."""
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
