"""Saved states, which of them are kept, and what is left of those that were deleted."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, false, text
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base

DELETED_AT = 0.0
"""As a checkpoint's time of expiry: it was deleted, and its files go as soon as the trainer does it."""


class Checkpoint(Base):
    """One saved state with a public path."""

    __tablename__ = "checkpoints"

    path: Mapped[str] = mapped_column(primary_key=True)
    location: Mapped[str]
    run_id: Mapped[str] = mapped_column(index=True)
    kind: Mapped[str]
    """Kind segment of the path: "weights", "sampler_weights" or "external_weights"."""
    owner: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    optimizer: Mapped[str] = mapped_column(server_default=text("'adamw'"))
    version_id: Mapped[str]
    lora_rank: Mapped[int]
    train_unembed: Mapped[bool]
    train_mlp: Mapped[bool]
    train_attn: Mapped[bool]
    has_optimizer: Mapped[bool]
    step: Mapped[int] = mapped_column(BigInteger)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(index=True)
    user_metadata: Mapped[dict[str, str]] = mapped_column(JSON)
    public: Mapped[bool] = mapped_column(server_default=false())
    """Published: whoever has the path may read it."""
    inflight: Mapped[bool] = mapped_column(server_default=false())
    """Saved with kind "inflight": samplers made from its path follow the run's newest inflight version."""
    pinned: Mapped[bool] = mapped_column(server_default=false())
    """No retention policy deletes it, and its time does not run out."""


class RetiredCheckpoint(Base):
    """Files of a deleted or expired checkpoint that live samplers still need. They go when the last sampler ends."""

    __tablename__ = "retired_checkpoints"

    location: Mapped[str] = mapped_column(primary_key=True)
    """Where the files lie now."""
    source: Mapped[str]
    """Where they lay when the samplers were made."""
    version_id: Mapped[str]
    base_model: Mapped[str]
    retired_at: Mapped[float]


class RetentionPolicy(Base):
    """Which checkpoints of a run are kept, where that is not the default."""

    __tablename__ = "retention_policies"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[dict[str, Any]] = mapped_column(JSON)
    """gateway/storage/retention_rules.py reads it."""
    changed_at: Mapped[float]


class Deletion(Base):
    """A checkpoint that was deleted by a request with an X-Idempotency-Key, which may come again."""

    __tablename__ = "deletions"

    owner: Mapped[str] = mapped_column(primary_key=True)
    idempotency_key: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
