"""Schemas of JSON bodies and URL parameters. An unknown field that is set is refused by name."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    ConfigDict,
    Field,
    model_validator,
)

from gateway.ids import LAST_CLONE_ID
from gateway.schema_types import Id, Known, Listed, Metadata, RequestId, ShortStops, Stops, Tags, Text, TinkerBody
from tinsmith.rpc.notes import MAX_CHARACTERS


class CreateSession(TinkerBody):
    tags: Tags = Field(default=[])
    user_metadata: Metadata | None = None
    sdk_version: Id | None = None
    project_id: Id | None = None
    display_name: Id | None = None


class SessionHeartbeat(TinkerBody):
    session_id: Id


class FinishReason(TinkerBody):
    type: Literal["success", "errored", "interrupted"]


class FinishSession(TinkerBody):
    reason: FinishReason
    detail: Annotated[Text | None, Field(max_length=MAX_CHARACTERS)] = None


class LoraConfig(TinkerBody):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(TinkerBody):
    """Type of the optimizer. The trainer checks it."""

    type: str = "adamw"
    version: Literal[1] | None = None

    @model_validator(mode="after")
    def _version_is_dimuons(self) -> OptimizerConfig:
        if self.version is not None and self.type != "dimuon":
            raise ValueError(f"version: only dimuon has one; {self.type!r} has none")
        return self


class NewModelIds(TinkerBody):
    session_id: Id
    model_seq_id: int = Field(ge=0, lt=2**31)


class CreateModel(NewModelIds):
    base_model: Id
    lora_config: LoraConfig | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


def _may_lack(*names: str) -> ConfigDict:
    """Makes fields optional in the OpenAPI document; the gateway fills them in before the body is validated."""

    def drop(schema: dict[str, Any]) -> None:
        schema["required"] = [name for name in schema.get("required", ()) if name not in names]

    return ConfigDict(json_schema_extra=drop)


class OperationIds(TinkerBody):
    model_config = _may_lack("seq_id")

    model_id: Text = Field(min_length=1, max_length=300)
    seq_id: int = Field(ge=1, lt=2**31)


class GivenIds(TinkerBody):
    """Ids of a training operation, as a client sends them. An operation without seq_id gets the next number."""

    model_id: Text = Field(min_length=1, max_length=300)
    seq_id: int | None = Field(default=None, ge=1, lt=2**31)


class AdamParams(TinkerBody):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class DimuonParams(TinkerBody):
    type: Literal["dimuon"]
    learning_rate: float
    beta1: float = 0.9
    grad_clip_norm: float = 0.0


class OptimStep(OperationIds):
    adam_params: AdamParams | None = None
    optimizer_params: DimuonParams | None = None


class SaveWeights(OperationIds):
    path: Id
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSampler(OperationIds):
    path: Id | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0, lt=2**63)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None


class LoadWeightsFields(TinkerBody):
    """Fields that both forms of load_weights have. The ids of each form have schemas of their own."""

    path: Id
    optimizer: bool = False
    base_model: Id | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class GetInfo(TinkerBody):
    model_id: Id


class UnloadModel(TinkerBody):
    model_id: Id


class WeightsInfo(TinkerBody):
    tinker_path: Id


class CreateSamplingSession(TinkerBody):
    session_id: Id
    sampling_session_seq_id: int = Field(ge=0, lt=2**63)
    base_model: Id | None = None
    model_path: Id | None = None


class SampleIds(TinkerBody):
    model_config = _may_lack("sampling_session_id", "seq_id")

    sampling_session_id: Text = Field(min_length=1, max_length=300)
    seq_id: int = Field(ge=0, lt=2**63)


class GivenSampleIds(TinkerBody):
    """Ids of a sample, as a client sends them. A sample without sampling_session_id names its weights, and a sample
    without seq_id gets the next number."""

    sampling_session_id: Text | None = Field(default=None, min_length=1, max_length=300)
    seq_id: int | None = Field(default=None, ge=0, lt=2**63)
    base_model: Id | None = None
    model_path: Id | None = None


class ModelInput(TinkerBody):
    chunks: Listed[dict[str, Any]]


class TensorData(TinkerBody):
    data: Listed[int] | Listed[float]
    dtype: Literal["int64", "float32"]
    shape: Listed[int] | None = None
    sparse_crow_indices: Listed[int] | None = None
    sparse_col_indices: Listed[int] | None = None


class SamplingParams(TinkerBody):
    max_tokens: int | None = None
    seed: int | None = None
    stop: Annotated[str | Stops[str] | Stops[int], ShortStops] | None = None
    temperature: float | None = None
    top_k: int = -1
    top_p: float | None = None


class Sample(SampleIds):
    num_samples: int = Field(default=1, ge=1)
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    base_model: Id | None = None
    model_path: Id | None = None


class RetrieveFuture(TinkerBody):
    HARMLESS = TinkerBody.HARMLESS | {"model_id", "sample_sequence_ids"}
    """Fields of a receipt. A client may send back a whole receipt."""

    request_id: RequestId
    allow_metadata_only: bool = False


class CancelFuture(TinkerBody):
    HARMLESS = RetrieveFuture.HARMLESS

    request_id: RequestId


class FuturesTarget(TinkerBody):
    type: Literal["sampling_session"]
    sampling_session_id: Id
    cloned_sampler_id: int = Field(default=0, ge=0, le=LAST_CLONE_ID)


class RetrieveFutures(TinkerBody):
    target: FuturesTarget
    prev_cursor: int = Field(default=0, ge=0, lt=2**53)
    timeout: float | None = Field(default=None, ge=0)
    retrieved_request_ids: Listed[str] = Field(default=[])


class JoinSamplingSession(TinkerBody):
    sampling_session_id: Id


class CustomLossInput(TinkerBody):
    name: Text
    rank: int = Field(ge=0, le=2)


class CreateCustomLoss(TinkerBody):
    session_id: Id
    custom_loss_seq_id: int = Field(ge=0, lt=2**63)
    name: Text = Field(max_length=200)
    inputs: Listed[CustomLossInput]
    graph: dict[str, Any]


# Management


class SaveWeightsExternal(OperationIds):
    path: Id
    ttl_seconds: int | None = None
    age_encryption_recipients: Listed[str] | None = Field(default=None, max_length=10)


class RetentionRules(Known):
    """Rules for one kind of checkpoint. A checkpoint that no rule keeps is deleted; without rules all are kept."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    keep_last: int | None = Field(default=None, ge=1, lt=2**31)
    """Number of the newest checkpoints to keep."""
    keep_every_steps: int | None = Field(default=None, ge=1, lt=2**31)
    """Keeps the first checkpoint at or after each multiple of this number of optimizer steps."""
    keep_within_seconds: int | None = Field(default=None, ge=1, lt=2**31)
    """Keeps all checkpoints that are younger than this, in seconds."""

    @property
    def keep_all(self) -> bool:
        return self.keep_last is None and self.keep_every_steps is None and self.keep_within_seconds is None


class Policy(Known):
    """The retention policy of a training run."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    training: RetentionRules = RetentionRules()
    """Rules for checkpoints that training resumes from."""
    sampler: RetentionRules = RetentionRules()
    """Rules for checkpoints of sampler weights."""

    @property
    def keep_all(self) -> bool:
        return self.training.keep_all and self.sampler.keep_all

    def of(self, kind: str) -> RetentionRules:
        """The rules for a kind of path: "weights" or "sampler_weights"."""
        return {"weights": self.training, "sampler_weights": self.sampler}[kind]


class Prune(TinkerBody):
    policy: Policy | None = None
    """Policy to apply. Without one, the run's own policy is applied."""
    paths: Listed[str] | None = None
    """Delete only these paths, even if the policy keeps fewer by now."""
    dry_run: bool = False


class SetTtl(TinkerBody):
    ttl_seconds: int | None
    """Lifetime from now on, in seconds. null means that the checkpoint does not expire."""


class CopyWeights(TinkerBody):
    source_path: Id
    destination_project_id: Id | None = None
    session_id: Id | None = None
    model_seq_id: int | None = Field(default=None, ge=0, lt=2**31)
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class AssignProject(TinkerBody):
    project_id: Id = Field(min_length=1)


class TrainerName(TinkerBody):
    trainer: Id
    """Address or trainer_id of a trainer."""


class Drain(TrainerName):
    until_restart: bool = False
    """Let the trainer take runs again as soon as it has restarted."""


class Query(Known):
    """Parameters of a URL. All of them are text, so they are converted to the types of the fields."""


class ScopedQuery(Query):
    access_scope: Literal["owned", "accessible"] = "owned"


class ImportQuery(Query):
    base_model: Id
    name: Text
    ttl_seconds: int | None = None


class PageQuery(Query):
    limit: int = Field(default=20, ge=0, le=1000)
    offset: int = Field(default=0, ge=0, lt=2**31)


class RunsQuery(PageQuery, ScopedQuery):
    project_id: Id | None = None


class SessionsQuery(PageQuery, ScopedQuery):
    pass


class CheckpointsQuery(PageQuery):
    limit: int = Field(default=100, ge=0, le=1000)


class AuditQuery(Query):
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all"
    day: date | None = None


class UsageQuery(Query):
    starting_on: AwareDatetime
    ending_before: AwareDatetime


class StorageQuery(Query):
    project_id: Id | None = None


class OwnSearch(TinkerBody):
    type: Literal["own"]


class AccessibleSearch(TinkerBody):
    type: Literal["accessible"]


class UserSearch(TinkerBody):
    type: Literal["user"]
    owner_urns: Listed[Text] = Field(min_length=1, max_length=10)


class ActiveQuery(TinkerBody):
    type: Literal["active"]


class CancelledQuery(TinkerBody):
    type: Literal["cancelled"]


class FailedQuery(TinkerBody):
    type: Literal["failed"]


class FinishedQuery(TinkerBody):
    type: Literal["client_finished"]
    reasons: Listed[Literal["success", "errored", "interrupted"]] | None = Field(
        default=None, min_length=1, max_length=16
    )


StatusQuery = ActiveQuery | CancelledQuery | FailedQuery | FinishedQuery


class SearchCursor(TinkerBody):
    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_session_id: Text


class SearchSessions(TinkerBody):
    session_id: Id | None = None
    project_ids: Listed[Text] | None = Field(default=None, max_length=100)
    user_metadata: Metadata = Field(default={})
    display_name: Id | None = Field(default=None, min_length=1)
    owner: Annotated[OwnSearch | AccessibleSearch | UserSearch, Field(discriminator="type")] = OwnSearch(type="own")
    statuses: list[Annotated[StatusQuery, Field(discriminator="type")]] | None = Field(
        default=None, min_length=1, max_length=16
    )
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None
