"""Tables behind timelines of sessions and charts of runs."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Index
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class Span(Base):
    """One finished piece of work in the timeline of its session."""

    __tablename__ = "spans"

    span_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    session_id: Mapped[str]
    track: Mapped[str]
    """Id of the model or sampling session."""
    name: Mapped[str]
    """The endpoint, such as optim_step."""
    request_id: Mapped[str]
    submitted_at: Mapped[float]
    started_at: Mapped[float | None]
    """Time at which a service began to compute; absent when that is not known."""
    computed_at: Mapped[float | None]
    """Time at which that service had computed the result."""
    ended_at: Mapped[float] = mapped_column(index=True)
    outcome: Mapped[str]
    """ok, user, server, unknown or dropped."""
    num_tokens: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (Index("ix_spans_session_id", "session_id"),)


class MetricPoint(Base):
    """The metrics of one operation of a run, or of several operations that were merged."""

    __tablename__ = "metric_points"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    seq_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """seq_id of the last operation."""
    first_seq_id: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[float] = mapped_column(index=True)
    """Time at which the last operation was computed."""
    num_steps: Mapped[int]
    """Number of optimizer steps among the operations."""
    num_operations: Mapped[int]
    sums: Mapped[dict[str, list[float]]] = mapped_column(JSON)
    """metric -> [value, weight, number of values that were not finite]; see gateway/dashboard/points.py."""
