"""What the gateway answers with, for the document. Handlers write these objects themselves; the fuzz tests hold their
answers against this."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class Detail(TypedDict):
    detail: str


class OpenAIErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    error: OpenAIErrorFields


class Empty(TypedDict):
    pass


class Health(TypedDict):
    status: Literal["ok", "starting"]
    waiting_for: NotRequired[list[str]]


class ClientConfig(TypedDict):
    proto_compress_fwdbwd: bool
    pjwt_auth_enabled: bool
    sample_use_retrieve_futures: bool
    sample_join_sampling_session: bool
    custom_loss_server_side: bool


class DynamicConfig(TypedDict):
    sample_cancel_enabled: bool


class SupportedModel(TypedDict):
    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool


class Imported(TypedDict):
    path: str
    notes: list[str]


class Capabilities(TypedDict):
    supported_models: list[SupportedModel]


class Jwt(TypedDict):
    jwt: str


class OrganizationDetails(TypedDict):
    name: str


class UserDetails(TypedDict):
    email: str


class KeyDetails(TypedDict):
    org_details: OrganizationDetails
    user_details: UserDetails


class OwnKey(TypedDict):
    key_id: int
    name: str
    note: str
    details: KeyDetails


class Accepted(TypedDict):
    status: Literal["accepted"]


class CreatedSession(TypedDict):
    type: Literal["create_session"]
    session_id: str
    info_message: str


class Heartbeat(TypedDict):
    type: Literal["session_heartbeat"]


class Receipt(TypedDict):
    """The result comes from retrieve_future."""

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
    lora_rank: int
    optimizer_config: OptimizerType
    model_data: ModelData


class WeightsFacts(TypedDict):
    base_model: str
    is_lora: bool
    lora_rank: int
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


class Sampler(TypedDict):
    sampler_id: str
    base_model: str
    model_path: str | None


class Completions(TypedDict):
    completions: list[dict[str, Any]]
    cursor: int


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


class CheckpointDetails(CheckpointFacts):
    base_model: str
    version_id: str
    step: int
    is_lora: bool
    lora_rank: int | None
    optimizer: str | None
    pinned: bool
    files: list[FileFacts]


class KeptCheckpoint(CheckpointFacts):
    kept_as: list[Literal["no_rules", "last", "every", "within", "pinned", "published", "in_use"]]


class RetentionPlan(TypedDict):
    delete: list[CheckpointFacts]
    keep: list[KeptCheckpoint]


class Retention(RetentionPlan):
    policy: dict[str, dict[str, int]]
    is_default: bool


class Pruned(RetentionPlan):
    deleted: NotRequired[list[CheckpointFacts]]


class Page(TypedDict):
    offset: int
    limit: int
    total_count: int


class CheckpointList(TypedDict):
    checkpoints: list[CheckpointFacts]


class CheckpointPage(CheckpointList):
    cursor: Page


class TrainingRun(TypedDict):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool
    lora_rank: int | None
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


class Certificate(TypedDict):
    version_id: str
    passed: bool
    limit: float | None
    samplers: list[SamplerGap]
    weights_hash: str
    num_bytes: int
    publish_seconds: float
    issued_at: str


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


class TraceExport(TypedDict):
    status: Literal["ready"]
    url: str


class AuditEntry(TypedDict):
    timestamp: str
    event: str
    event_details: dict[str, Any]
    model_id: NotRequired[str | None]
    tinker_path: NotRequired[str | None]
    purpose: NotRequired[str | None]


class AuditLog(TypedDict):
    entries: list[AuditEntry]


class UsageEvents(TypedDict):
    data: list[dict[str, Any]]
    sessions: dict[str, dict[str, Any]]
    cost_data_through: str | None


class StorageRow(TypedDict):
    project_id: str
    org_user_urn: str
    user_email: str | None
    user_name: str | None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float


class Storage(TypedDict):
    effective_rate_usd_per_gigabyte_month: float
    data: list[StorageRow]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None


class ModelCards(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class VersionSpan(TypedDict):
    """A stretch of a choice's tokens that one version drew."""

    version: str
    num_tokens: int


class ChoiceExtension(TypedDict):
    """Of a choice that follows a training run."""

    version_spans: list[VersionSpan]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    tinsmith: NotRequired[ChoiceExtension]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    version: str | None
    choices: list[CompletionChoice]
    usage: Usage


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: NotRequired[list[int]]
    tinsmith: NotRequired[ChoiceExtension]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    version: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
