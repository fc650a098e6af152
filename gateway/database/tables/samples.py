"""What sampling leaves: how far it has come, records for losses, and the newest sequences to look at."""

from __future__ import annotations

from sqlalchemy import BigInteger, Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class SampleMark(Base):
    """How far the seq_ids of one client's samples have come, so that a restarted gateway can tell the client to look
    after those that were in work."""

    __tablename__ = "sample_marks"

    sampling_session_id: Mapped[str] = mapped_column(primary_key=True)
    clone_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """seq_id // 10**9."""
    low: Mapped[int] = mapped_column(BigInteger)
    """Every sample before this seq_id is over."""
    high: Mapped[int] = mapped_column(BigInteger)
    """No sample after this seq_id was accepted."""
    home: Mapped[str | None]
    """The gateway that has these samples, where there are several; absent: the next that is asked for one."""


class SequenceRecord(Base):
    """What sampling with record_stability_info leaves of a sequence, for losses that name it."""

    __tablename__ = "sequence_records"

    sequence_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(index=True)
    version_id: Mapped[str]
    """What it was drawn from; empty for the base model."""
    prompt: Mapped[bytes] = mapped_column(LargeBinary)
    """int32, little endian."""
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    """int32, little endian."""
    logprobs: Mapped[bytes] = mapped_column(LargeBinary)
    """float32, little endian, one for each of `tokens`."""
    expires_at: Mapped[float] = mapped_column(index=True)


class RecentSample(Base):
    """One of the newest sequences that were drawn from a run, to look at."""

    __tablename__ = "recent_samples"

    sample_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str]
    owner: Mapped[str]
    """Who drew it; nobody else sees it."""
    base_model: Mapped[str]
    at: Mapped[float] = mapped_column(index=True)
    request_id: Mapped[str]
    version_id: Mapped[str]
    """What its last token was drawn from."""
    num_prompt_tokens: Mapped[int]
    prompt: Mapped[bytes] = mapped_column(LargeBinary)
    """int32, little endian: the end of the prompt."""
    num_tokens: Mapped[int]
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    """int32, little endian: the beginning of the output."""
    logprobs: Mapped[bytes] = mapped_column(LargeBinary)
    """float32, little endian, one for each of `tokens`; empty when there are none."""
    ranks: Mapped[bytes] = mapped_column(LargeBinary)
    """uint16, little endian, one for each of `tokens`: its place among the most probable ones, from 1, or 0 where it
    is none of those that were asked for; empty when none were."""
    is_finished: Mapped[bool]
    """It ended by itself, not at max_tokens."""

    __table_args__ = (Index("ix_recent_samples_run_id_owner", "run_id", "owner"),)
