"""Answers about sessions, models and samplers, and receipts."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict


class CreatedSession(TypedDict):
    type: Literal["create_session"]
    session_id: str
    info_message: str


class Heartbeat(TypedDict):
    type: Literal["session_heartbeat"]


class Receipt(TypedDict):
    """Receipt of a submission; retrieve_future gives the result."""

    request_id: str
    model_id: str


class LossReceipt(TypedDict):
    request_id: str


class SampleReceipt(TypedDict):
    request_id: str
    model_id: None
    sample_sequence_ids: list[str]


class OptimizerType(TypedDict):
    type: str


class ModelData(TypedDict):
    arch: str | None
    model_name: str
    tokenizer_id: str | None


class ModelInfo(TypedDict):
    type: Literal["get_info"]
    model_id: str
    model_name: str
    is_lora: bool
    lora_rank: int | None
    optimizer_config: OptimizerType
    model_data: ModelData


class WeightsFacts(TypedDict):
    base_model: str
    is_lora: bool
    lora_rank: int | None
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: OptimizerType


class CopiedWeights(TypedDict):
    tinker_path: str


class CreatedSampler(TypedDict):
    type: Literal["create_sampling_session"]
    sampling_session_id: str


class JoinedSampler(TypedDict):
    type: Literal["join_sampling_session"]
    client_counter: int


class SamplerFacts(TypedDict):
    sampler_id: str
    base_model: str
    model_path: str | None


class CompletionPage(TypedDict):
    completions: list[dict[str, Any]]
    cursor: int


class SessionIds(TypedDict):
    sessions: list[str]


class SessionMembers(TypedDict):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None
    display_name: str | None


class SessionFacts(TypedDict):
    session_id: str
    created_at: str
    owner: str
    project_id: str
    status: dict[str, Any] | None
    checkpoints_count: int
    display_name: str | None
    user_metadata: dict[str, str] | None
    checkpoint_storage_bytes: int


class SessionCursor(TypedDict):
    last_created_at: str
    last_session_id: str


class SessionPage(TypedDict):
    sessions: list[SessionFacts]
    next_cursor: SessionCursor | None
