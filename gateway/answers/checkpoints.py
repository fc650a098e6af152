"""Answers about checkpoints and training runs."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from gateway.storage.retention_rules import KeptAs


class Imported(TypedDict):
    path: str
    notes: list[str]


class CheckpointFacts(TypedDict):
    checkpoint_id: str
    checkpoint_type: str
    time: str
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None
    expires_at: str | None


class FileFacts(TypedDict):
    name: str
    size_bytes: int
    sha256: str


class VerifiedFile(FileFacts):
    problem: str | None


class Verified(TypedDict):
    tinker_path: str
    intact: bool
    files: list[VerifiedFile]
    problem: str | None


class Lora(TypedDict):
    is_lora: bool
    lora_rank: int | None


class CheckpointDetails(CheckpointFacts, Lora):
    base_model: str
    version_id: str
    step: int
    optimizer: str | None
    pinned: bool
    files: list[FileFacts]


class KeptCheckpoint(CheckpointFacts):
    kept_as: list[KeptAs]


class RetentionPlan(TypedDict):
    delete: list[CheckpointFacts]
    keep: list[KeptCheckpoint]


class RetentionState(RetentionPlan):
    policy: dict[str, dict[str, int]]
    is_default: bool


class PruneResult(RetentionPlan):
    deleted: NotRequired[list[CheckpointFacts]]


class Page(TypedDict):
    offset: int
    limit: int
    total_count: int


class CheckpointList(TypedDict):
    checkpoints: list[CheckpointFacts]


class CheckpointPage(CheckpointList):
    cursor: Page


class TrainingRun(Lora):
    training_run_id: str
    base_model: str
    model_owner: str
    corrupted: bool
    last_request_time: str
    last_checkpoint: CheckpointFacts | None
    last_sampler_checkpoint: CheckpointFacts | None
    user_metadata: dict[str, str] | None


class TrainingRunPage(TypedDict):
    training_runs: list[TrainingRun]
    cursor: Page


class SignedUrls(TypedDict):
    urls: dict[str, str]
    expires: str


class SignedUrl(TypedDict):
    url: str
    expires: str


class SamplerGap(TypedDict):
    address: str
    engine: str
    max_gap: float | Literal["inf"]
    mean_gap: float | Literal["inf"]
    num_tokens: int
    applied: Literal["yes", "too weak to tell", "no", "differently"] | None
    factor: float | None


class Certificate(TypedDict):
    version_id: str
    passed: bool
    limit: float | None
    mean_limit: float | None
    change: float | Literal["inf"]
    samplers: list[SamplerGap]
    weights_hash: str
    num_bytes: int
    publish_seconds: float
    issued_at: str
