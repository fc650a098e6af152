"""Tables of checkpoints, retention policies and deletions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, false, text
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base

DELETED_AT = 0.0
"""Value of `expires_at` that marks a deleted checkpoint whose files the trainer has still to remove."""


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
    """True for a published checkpoint, which everyone who has the path may read."""
    inflight: Mapped[bool] = mapped_column(server_default=false())
    """True for a checkpoint that was saved with kind "inflight". Samplers made from its path follow the run's newest
    inflight version."""
    pinned: Mapped[bool] = mapped_column(server_default=false())
    """True for a checkpoint that no retention policy deletes, and that does not expire."""


class RetiredCheckpoint(Base):
    """A copy of a deleted or expired checkpoint that live samplers still need. The copy is deleted after the last of
    these samplers has ended."""

    __tablename__ = "retired_checkpoints"

    location: Mapped[str] = mapped_column(primary_key=True)
    """Location of the copy at the trainer."""
    source: Mapped[str]
    """Location of the checkpoint when the samplers were made."""
    version_id: Mapped[str]
    base_model: Mapped[str]
    retired_at: Mapped[float]


class RetentionPolicy(Base):
    """The retention policy of a run that does not have the default one."""

    __tablename__ = "retention_policies"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[dict[str, Any]] = mapped_column(JSON)
    """A `Policy` of gateway/schemas.py."""
    changed_at: Mapped[float]


class Deletion(Base):
    """A deletion by a request with an X-Idempotency-Key. By this row a repeat of the request is recognised."""

    __tablename__ = "deletions"

    owner: Mapped[str] = mapped_column(primary_key=True)
    idempotency_key: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
