"""What happened in a session and in a run, for timelines and charts."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Index
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class Span(Base):
    """A piece of work that is over, for the timeline of its session."""

    __tablename__ = "spans"

    span_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    session_id: Mapped[str]
    track: Mapped[str]
    """Model or sampling session."""
    name: Mapped[str]
    """Endpoint."""
    request_id: Mapped[str]
    submitted_at: Mapped[float]
    started_at: Mapped[float | None]
    """When a service began to compute it; absent when that is not known."""
    computed_at: Mapped[float | None]
    """When that service was done with it."""
    ended_at: Mapped[float] = mapped_column(index=True)
    outcome: Mapped[str]
    """ok, user, server, unknown or dropped."""
    num_tokens: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (Index("ix_spans_session_id", "session_id"),)


class MetricPoint(Base):
    """What the trainer answered to one operation of a run, or to several that were merged."""

    __tablename__ = "metric_points"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    seq_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Of the last operation."""
    first_seq_id: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(index=True)
    """When the last one was computed."""
    num_steps: Mapped[int]
    """Optimizer steps among them."""
    num_operations: Mapped[int]
    sums: Mapped[dict[str, list[float]]] = mapped_column(JSON)
    """Of each metric, [value, weight, values that were not finite]; gateway/dashboard/points.py reads it."""
