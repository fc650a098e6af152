"""The database: an index of what exists. Times are seconds since 1970, UTC."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, LargeBinary, UniqueConstraint, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

DELETED_AT = 0.0
"""As a checkpoint's time of expiry: it was deleted, and its files go as soon as the trainer does it."""


class Base(DeclarativeBase):
    pass


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


class CustomLoss(Base):
    """One loss that a client has traced."""

    __tablename__ = "custom_losses"

    loss_id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    message: Mapped[bytes] = mapped_column(LargeBinary)
    """A serialized tinsmith.v1.CustomLoss."""
    created_at: Mapped[float]


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


class Usage(Base):
    """What was used in one hour: tokens, checkpoints, or byte-hours of storage."""

    __tablename__ = "usage"

    hour: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Hours since 1970, UTC."""
    owner: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(primary_key=True)
    """Empty for storage."""
    base_model: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    """training, sampling_prefill, sampling_prefill_cached, sampling_sample, checkpoint or storage."""
    amount: Mapped[int] = mapped_column(BigInteger)


class StoredKey(Base):
    """A key that the command line has made. Its row stays when it is revoked."""

    __tablename__ = "api_keys"

    key_hash: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 in hexadecimal digits; the key itself is nowhere. No salt and no slow hash: a key is 256 random bits."""
    owner: Mapped[str]
    name: Mapped[str]
    note: Mapped[str]
    email: Mapped[str]
    admin: Mapped[bool]
    """Sees and changes what belongs to any owner."""
    created_at: Mapped[float]
    last_used_at: Mapped[float | None]
    """Written now and then."""
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)


class Budget(Base):
    """What an owner may use in total. Who has no row, or an empty column, may use any amount."""

    __tablename__ = "budgets"

    owner: Mapped[str] = mapped_column(primary_key=True)
    tokens: Mapped[int | None] = mapped_column(BigInteger)
    tokens_from: Mapped[int] = mapped_column(BigInteger)
    """The owner's count of tokens from which the budget counts."""
    storage_bytes: Mapped[int | None] = mapped_column(BigInteger)
    changed_at: Mapped[float]


class TokenCount(Base):
    """All tokens that were trained on, read or sampled: the sum of the usage of all hours."""

    __tablename__ = "token_counts"

    owner: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    """Of the key that made the session; empty for what was used before keys were counted."""
    amount: Mapped[int] = mapped_column(BigInteger)


class AuditEvent(Base):
    """Something that was done to a checkpoint, a project or a key."""

    __tablename__ = "audit_events"

    event_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(index=True)
    owner: Mapped[str]
    """Who did it."""
    category: Mapped[str]
    """checkpoints, projects, teams or organizations."""
    event: Mapped[str]
    """Such as checkpoint_delete."""
    details: Mapped[dict[str, Any]] = mapped_column(JSON)


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


class Setting(Base):
    """A fact that all gateways behind one database share."""

    __tablename__ = "settings"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class Operation(Base):
    """What the gateway must remember of a submission to finish it after a restart."""

    __tablename__ = "operations"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[str]
    kind: Mapped[str]
    """Endpoint: create_model, load_weights, save_weights, save_weights_for_sampler, or another that was refused;
    copy_weights, which is over, and whose request_id is the path of the copy."""
    path: Mapped[str | None]
    """Path that was loaded or copied, or is being saved."""
    sampling_session_id: Mapped[str | None]
    """Set for an ephemeral save."""
    inflight: Mapped[bool] = mapped_column(server_default=false())
    """A save with kind "inflight"."""
    error: Mapped[str | None]
    """Why the gateway refused it; the trainer then has only its number."""
    fingerprint: Mapped[str]
    """Hash of the request, to tell a repeat from a conflict."""
    created_at: Mapped[float]
    gateway_id: Mapped[str | None]
    """Who sees to it that what the trainer answers is written down."""
    settled_at: Mapped[float | None]
    """When that was done; what it has made may have gone since."""

    __table_args__ = (
        Index("ix_operations_model_id", "model_id"),
        Index("ix_operations_settled_at", "settled_at"),
    )


class CountedOperation(Base):
    """A training operation whose tokens are in the usage: several gateways may see its answer, and one counts."""

    __tablename__ = "counted_operations"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    seq_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)


class Deletion(Base):
    """A checkpoint that was deleted by a request with an X-Idempotency-Key, which may come again."""

    __tablename__ = "deletions"

    owner: Mapped[str] = mapped_column(primary_key=True)
    idempotency_key: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(index=True)


class GatewayRow(Base):
    """One of several gateways behind the database: it lives as long as its row is here."""

    __tablename__ = "gateways"

    gateway_id: Mapped[str] = mapped_column(primary_key=True)
    """New at every start."""
    url: Mapped[str]
    """Where the others reach it."""
    beat: Mapped[int] = mapped_column(BigInteger)
    """Goes up as long as it lives; who sees that it no longer does takes the row away."""
    busy_models: Mapped[list[str]] = mapped_column(JSON)
    """Models for which it waits for the trainer."""


class Lease(Base):
    """Work that one of the gateways does for all."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
