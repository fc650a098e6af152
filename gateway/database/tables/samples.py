"""Tables of sampling: progress of clients, requests that may have killed samplers, records for losses, and the newest
sequences for the dashboard."""

from __future__ import annotations

from sqlalchemy import BigInteger, Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from gateway.database.tables.base import Base


class SampleMark(Base):
    """The range of one client's samples that may be in work. A restarted gateway tells the client to send these samples
    again."""

    __tablename__ = "sample_marks"

    sampling_session_id: Mapped[str] = mapped_column(primary_key=True)
    clone_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """seq_id // 10**9."""
    low: Mapped[int] = mapped_column(BigInteger)
    """Every sample before this seq_id is done."""
    high: Mapped[int] = mapped_column(BigInteger)
    """No sample after this seq_id was accepted."""
    home: Mapped[str | None]
    """Id of the gateway that has these samples, if there are several gateways. Absent means that the next gateway that
    is asked for the samples takes them."""


class SuspectRow(Base):
    """A request that may have killed samplers, and was not answered since."""

    __tablename__ = "suspects"

    content: Mapped[str] = mapped_column(primary_key=True)
    """Hash of what the request asks for, and of its owner."""
    deaths: Mapped[int]
    is_condemned: Mapped[bool]
    died_at: Mapped[float] = mapped_column(index=True)


class SequenceRecord(Base):
    """A sequence that was sampled with record_stability_info, for losses that name it."""

    __tablename__ = "sequence_records"

    sequence_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(index=True)
    version_id: Mapped[str]
    """The version that the sequence was drawn from; empty for the base model."""
    prompt: Mapped[bytes] = mapped_column(LargeBinary)
    """int32, little endian. Only the first sequence of a request has the prompt; it is empty for the others."""
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    """int32, little endian."""
    logprobs: Mapped[bytes] = mapped_column(LargeBinary)
    """float32, little endian, one for each of `tokens`."""
    expires_at: Mapped[float] = mapped_column(index=True)


class RecentSample(Base):
    """One of the newest sequences that were drawn from a run, for the dashboard."""

    __tablename__ = "recent_samples"

    sample_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str]
    owner: Mapped[str]
    """The owner who drew the sequence. Only this owner and admins see it."""
    base_model: Mapped[str]
    at: Mapped[float] = mapped_column(index=True)
    request_id: Mapped[str]
    version_id: Mapped[str]
    """The version that the last token was drawn from."""
    num_prompt_tokens: Mapped[int]
    prompt: Mapped[bytes] = mapped_column(LargeBinary)
    """int32, little endian: the end of the prompt."""
    num_tokens: Mapped[int]
    tokens: Mapped[bytes] = mapped_column(LargeBinary)
    """int32, little endian: the beginning of the output."""
    logprobs: Mapped[bytes] = mapped_column(LargeBinary)
    """float32, little endian, one for each of `tokens`; empty when no logprobs were returned."""
    ranks: Mapped[bytes] = mapped_column(LargeBinary)
    """uint16, little endian, one for each of `tokens`: its rank by probability from 1, or 0 when it is not among the
    top-k tokens of the answer. Empty when no top-k tokens were asked for."""
    is_finished: Mapped[bool]
    """True if the sequence ended by itself, and not at max_tokens."""
    pictures: Mapped[str | None]
    """Thumbnails of the first pictures of the prompt: a JSON list with a data URL for each picture, or null for one
    without a thumbnail (thumbnails.py). Only the first sequence of a request has them."""

    __table_args__ = (Index("ix_recent_samples_run_id_owner", "run_id", "owner"),)
