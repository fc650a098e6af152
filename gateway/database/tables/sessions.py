"""Sessions, and what belongs to them: training runs and sampling sessions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class Session(Base):
    """One ServiceClient."""

    __tablename__ = "sessions"

    session_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    key_id: Mapped[str] = mapped_column(server_default=text("''"))
    """Of the key that made it; empty when there was none, or when keys were not counted yet."""
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
    ended_at: Mapped[float | None]
    """When it was ended by itself; absent for a run that ends with its session."""
    released_at: Mapped[float | None]
    """When the trainer was told to free it."""
    last_request_at: Mapped[float | None]
    """Of a training operation; written now and then."""
    inflight_version_id: Mapped[str | None]
    """The newest version that was saved with kind "inflight": what all inflight samplers of the run sample from."""
    inflight_location: Mapped[str | None]
    """Where the trainer finds it again."""


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
    inflight_run_id: Mapped[str | None]
    """The run whose newest inflight version it follows; absent for a snapshot."""
    num_joined: Mapped[int] = mapped_column(server_default=text("0"))
    """Clients that have joined it, which is the newest client_counter."""
