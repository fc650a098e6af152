"""Tables of sessions, and of the training runs and sampling sessions that belong to them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class Session(Base):
    """A session: one ServiceClient of the SDK."""

    __tablename__ = "sessions"

    session_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    key_id: Mapped[str] = mapped_column(server_default=text("''"))
    """Id of the key that made the session; empty when there was none, or when the row is older than this column."""
    idempotency_key: Mapped[str | None]
    created_at: Mapped[float] = mapped_column(index=True)
    last_seen_at: Mapped[float]
    ended_at: Mapped[float | None] = mapped_column(index=True)
    end_reason: Mapped[str | None]
    end_detail: Mapped[str | None]
    project_id: Mapped[str | None]
    display_name: Mapped[str | None]
    sdk_version: Mapped[str | None]
    tags: Mapped[list[str]] = mapped_column(JSON, default=list)
    user_metadata: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)

    __table_args__ = (
        UniqueConstraint("owner", "idempotency_key"),
        Index("ix_sessions_owner_created_at", "owner", "created_at", "session_id"),
    )


class Model(Base):
    """A training run. The columns from lora_rank to train_attn are absent until the trainer has made the model."""

    __tablename__ = "models"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    base_model: Mapped[str]
    """The name that the client asked for."""
    trainer_id: Mapped[str | None]
    """The trainer that has the run; absent in rows that are older than this column, and for copies and imports."""
    optimizer: Mapped[str]
    lora_rank: Mapped[int | None]
    train_unembed: Mapped[bool | None]
    train_mlp: Mapped[bool | None]
    train_attn: Mapped[bool | None]
    user_metadata: Mapped[dict[str, str]] = mapped_column(JSON)
    created_at: Mapped[float]
    ended_at: Mapped[float | None]
    """Time at which unload_model ended the run; absent for a run that ends with its session."""
    released_at: Mapped[float | None]
    """Time at which the trainer was told to free the model."""
    last_request_at: Mapped[float | None]
    """Time of the last training operation; written in batches."""
    inflight_version_id: Mapped[str | None]
    """The newest version that was saved with kind "inflight"; all inflight samplers of the run sample from it."""
    inflight_location: Mapped[str | None]
    """Location of that version at the trainer."""


class SamplingSession(Base):
    """A sampling session: one version of a model's weights, or the base model, to sample from."""

    __tablename__ = "sampling_sessions"

    sampling_session_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    """Tinker path of the weights; absent for the base model and for ephemeral saves."""
    version_id: Mapped[str]
    """Empty for the base model."""
    location: Mapped[str]
    """Location of the version at the trainer; empty for the base model."""
    created_at: Mapped[float]
    inflight_run_id: Mapped[str | None]
    """The run whose newest inflight version is sampled; absent when the version is fixed."""
    num_joined: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of clients that have joined; also the newest client_counter."""
