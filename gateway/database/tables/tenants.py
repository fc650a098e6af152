"""Tables of keys, budgets, usage and the audit log."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class StoredKey(Base):
    """A key that the command line has made. A revoked key keeps its row."""

    __tablename__ = "api_keys"

    key_hash: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 of the key, in hexadecimal digits. A key has 256 random bits, so it needs no salt and no slow hash."""
    owner: Mapped[str]
    name: Mapped[str]
    note: Mapped[str]
    email: Mapped[str]
    admin: Mapped[bool]
    """True if the holder may see and change the sessions, runs and checkpoints of every owner."""
    created_at: Mapped[float]
    last_used_at: Mapped[float | None]
    """Time of the last use; written every minute."""
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)


class Budget(Base):
    """The budgets of an owner. No row, or an empty column, means no limit."""

    __tablename__ = "budgets"

    owner: Mapped[str] = mapped_column(primary_key=True)
    tokens: Mapped[int | None] = mapped_column(BigInteger)
    tokens_from: Mapped[int] = mapped_column(BigInteger)
    """The owner's count of used tokens at which the budget began to count."""
    storage_bytes: Mapped[int | None] = mapped_column(BigInteger)
    changed_at: Mapped[float]


class HourlyUsage(Base):
    """Usage of one kind in one hour: tokens, checkpoints, or byte-hours of storage."""

    __tablename__ = "usage"

    hour: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Hours since 1970, UTC."""
    owner: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(primary_key=True)
    """Empty for storage, and for old hours whose usage is summed up over sessions."""
    base_model: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    """training, sampling_prefill, sampling_prefill_cached, sampling_sample, checkpoint or storage."""
    amount: Mapped[int] = mapped_column(BigInteger)


class TokenCount(Base):
    """Sum of all tokens of an owner and key that were trained on, read or sampled, over all hours."""

    __tablename__ = "token_counts"

    owner: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    """Id of the key that made the session; empty for usage from before this column existed."""
    amount: Mapped[int] = mapped_column(BigInteger)


class CountedOperation(Base):
    """A training operation whose tokens are counted. Several gateways may see its answer, but only one counts them."""

    __tablename__ = "counted_operations"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    seq_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)


class LedgerBatch(Base):
    """The newest batch of a gateway's ledger. The row is written in the transaction of the batch."""

    __tablename__ = "ledger_batches"

    ledger_id: Mapped[str] = mapped_column(primary_key=True)
    """A new id at every start of a gateway."""
    number: Mapped[int] = mapped_column(BigInteger)
    written_at: Mapped[float]


class AuditEvent(Base):
    """An entry of the audit log: an action on a checkpoint, a project or a key."""

    __tablename__ = "audit_events"

    event_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(index=True)
    owner: Mapped[str]
    """The owner who took the action, or "operator" for the command line."""
    category: Mapped[str]
    """checkpoints, projects, teams or organizations."""
    event: Mapped[str]
    """Name of the action, such as checkpoint_delete."""
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
