"""The database: an index of what exists. Times are seconds since 1970, UTC."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Session(Base):
    """One ServiceClient."""

    __tablename__ = "sessions"

    session_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    idempotency_key: Mapped[str | None]
    created_at: Mapped[float] = mapped_column(index=True)
    last_seen_at: Mapped[float]
    ended_at: Mapped[float | None]
    end_reason: Mapped[str | None]
    end_detail: Mapped[str | None]
    project_id: Mapped[str | None]
    display_name: Mapped[str | None]
    sdk_version: Mapped[str | None]
    tags: Mapped[list[str]] = mapped_column(JSON)
    user_metadata: Mapped[dict[str, Any]] = mapped_column(JSON)

    __table_args__ = (UniqueConstraint("owner", "idempotency_key"),)


class Model(Base):
    """One training run. The adapter's facts are known once the trainer has made it."""

    __tablename__ = "models"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    base_model: Mapped[str]
    """The name that the client asked for."""
    optimizer: Mapped[str]
    lora_rank: Mapped[int | None]
    train_unembed: Mapped[bool | None]
    train_mlp: Mapped[bool | None]
    train_attn: Mapped[bool | None]
    user_metadata: Mapped[dict[str, str]] = mapped_column(JSON)
    created_at: Mapped[float]
    released_at: Mapped[float | None]
    """When the trainer was told to free it."""


class SamplingSession(Base):
    """One SamplingClient: a version of one model's weights, or the base model."""

    __tablename__ = "sampling_sessions"

    sampling_session_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    """Absent for the base model and for ephemeral saves."""
    version_id: Mapped[str]
    """Empty for the base model."""
    location: Mapped[str]
    """Where the trainer finds the version again; empty for the base model."""
    created_at: Mapped[float]


class Checkpoint(Base):
    """One saved state with a public path."""

    __tablename__ = "checkpoints"

    path: Mapped[str] = mapped_column(primary_key=True)
    location: Mapped[str]
    run_id: Mapped[str] = mapped_column(index=True)
    kind: Mapped[str]
    """Kind segment of the path: "weights" or "sampler_weights"."""
    owner: Mapped[str]
    base_model: Mapped[str]
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


class Operation(Base):
    """What the gateway must remember of a submission to finish it after a restart."""

    __tablename__ = "operations"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[str]
    kind: Mapped[str]
    """Endpoint: create_model, load_weights, save_weights, save_weights_for_sampler, or another that was refused."""
    path: Mapped[str | None]
    """Path that was loaded, or is being saved."""
    sampling_session_id: Mapped[str | None]
    """Set for an ephemeral save."""
    error: Mapped[str | None]
    """Why the gateway refused it; the trainer then has only its number."""
    fingerprint: Mapped[str]
    """Hash of the request, to tell a repeat from a conflict."""
    created_at: Mapped[float]

    __table_args__ = (Index("ix_operations_model_id", "model_id"),)
