"""Descriptions of all route functions for the OpenAPI document. A test fails for a route that is missing here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from gateway import answers, schemas
from gateway.http.openapi import bodies
from gateway.http.routes import (
    admin,
    checkpoints,
    custom_losses,
    downloads,
    futures,
    imports,
    keys,
    models,
    openai,
    retention,
    runs,
    sampling,
    service,
    sessions,
    telemetry,
    training,
    weights,
)
from gateway.openai import schemas as openai_schemas

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
BINARY: dict[str, Any] = {"type": "string", "format": "binary"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    summary: str
    answer: Any = None
    """Type of the JSON answer of success; None: no JSON."""
    body: type[BaseModel] | None = None
    """Schema of the JSON body."""
    query: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    """Error statuses, beside those of every operation with a body or a key."""
    also_takes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Further media types of the body, and their schemas."""
    also_answers: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    status: int = 200
    """Status of success."""
    needs_key: bool = True
    unready: Any = None
    """Type of the JSON answer of status 503, if that is no error."""


_SUBMISSION = (422, 429, 503)
"""Error statuses of submissions: the number was used by another request, too much work, the trainer is unreachable."""
_CHECKPOINT = (400, 404, 503)

OPERATIONS: dict[Callable[..., Any], Operation] = {
    # The service
    service.healthz: Operation(
        "Whether the gateway runs", answers.service.Health, needs_key=False, unready=answers.service.Health
    ),
    service.metrics: Operation(
        "Metrics for Prometheus", also_answers={"text/plain": {"type": "string"}}, needs_key=False
    ),
    service.client_config: Operation("Flags that a client reads once", answers.service.ClientConfig),
    service.client_dynamic_config: Operation("Flags that a client reads repeatedly", answers.service.DynamicConfig),
    service.get_server_capabilities: Operation("Base models", answers.service.Capabilities),
    keys.auth_token: Operation("A JWT for the key", answers.service.Jwt, errors=(404,)),
    keys.get_own_key: Operation("Facts about the key", answers.service.OwnKey),
    keys.delete_own_key: Operation("Revoke the key, unless it is set in the configuration", errors=(403,)),
    telemetry.telemetry: Operation("Accepted and thrown away unread", answers.service.Accepted),
    # Sessions
    sessions.create_session: Operation("A new session", answers.training.CreatedSession, schemas.CreateSession),
    sessions.session_heartbeat: Operation(
        "Keep a session alive", answers.training.Heartbeat, schemas.SessionHeartbeat, errors=(404, 410)
    ),
    sessions.finish_session: Operation("End a session", answers.service.Empty, schemas.FinishSession, errors=(404,)),
    sessions.list_sessions: Operation(
        "Ids of sessions", answers.training.SessionIds, query=schemas.SessionsQuery, errors=(400,)
    ),
    sessions.get_session: Operation(
        "Training runs and samplers of a session",
        answers.training.SessionMembers,
        query=schemas.ScopedQuery,
        errors=(400, 404),
    ),
    sessions.search_sessions: Operation("Search sessions", answers.training.SessionPage, schemas.SearchSessions),
    sessions.assign_project: Operation(
        "Put a session into a project", answers.service.Empty, schemas.AssignProject, errors=(404,)
    ),
    sessions.trace_export: Operation("URL of a session's timeline", answers.records.TraceExport, errors=(404,)),
    # Training
    models.create_model: Operation(
        "A new model", answers.training.Receipt, schemas.CreateModel, errors=(404, *_SUBMISSION)
    ),
    models.unload_model: Operation("End a model", answers.training.Receipt, schemas.UnloadModel, errors=(429,)),
    models.get_info: Operation("Facts about a model", answers.training.ModelInfo, schemas.GetInfo, errors=(404, 503)),
    training.forward_backward: Operation(
        "Add gradients of a batch",
        answers.training.Receipt,
        bodies.ForwardBackward,
        errors=_SUBMISSION,
        also_takes={PROTOBUF: BINARY},
    ),
    training.forward: Operation(
        "The losses of a batch, without gradients; for SDKs before 0.25",
        answers.training.Receipt,
        bodies.Forward,
        errors=_SUBMISSION,
        also_takes={PROTOBUF: BINARY},
    ),
    training.optim_step: Operation(
        "Apply the gradients", answers.training.Receipt, schemas.OptimStep, errors=_SUBMISSION
    ),
    custom_losses.create_custom_loss: Operation(
        "A loss that the client has traced",
        answers.training.LossReceipt,
        schemas.CreateCustomLoss,
        errors=(404, *_SUBMISSION),
    ),
    # Weights
    weights.save_weights: Operation(
        "Save a model's state", answers.training.Receipt, schemas.SaveWeights, errors=_SUBMISSION
    ),
    weights.save_weights_for_sampler: Operation(
        "Save and publish a model's weights",
        answers.training.Receipt,
        schemas.SaveWeightsForSampler,
        errors=_SUBMISSION,
    ),
    weights.save_weights_external: Operation(
        "Save a model's weights for download", answers.training.Receipt, schemas.SaveWeightsExternal, errors=_SUBMISSION
    ),
    weights.load_weights: Operation(
        "A new model from a checkpoint, or a checkpoint into a model",
        answers.training.Receipt,
        bodies.LoadWeights,
        errors=(404, *_SUBMISSION),
    ),
    weights.weights_info: Operation(
        "Facts about a checkpoint", answers.training.WeightsFacts, schemas.WeightsInfo, errors=(404, 503)
    ),
    weights.copy_weights: Operation(
        "Copy a checkpoint", answers.training.CopiedWeights, schemas.CopyWeights, errors=(403, 404, 422, 503)
    ),
    imports.import_checkpoint: Operation(
        "Import an adapter made elsewhere",
        answers.checkpoints.Imported,
        query=schemas.ImportQuery,
        errors=(400, 403, 413, 503),
        also_takes={"application/x-tar": BINARY},
    ),
    # Sampling
    sampling.create_sampling_session: Operation(
        "A new sampler", answers.training.CreatedSampler, schemas.CreateSamplingSession, errors=(404, 422, 503)
    ),
    sampling.join_sampling_session: Operation(
        "One more client of a sampler", answers.training.JoinedSampler, schemas.JoinSamplingSession, errors=(404,)
    ),
    sampling.get_sampler: Operation("The weights of a sampler", answers.training.Sampler, errors=(404,)),
    sampling.certificate: Operation(
        "Certificate of a sampler's version: how far the samplers are from the trainer",
        answers.checkpoints.Certificate,
        errors=(400, 404, 503),
    ),
    sampling.asample: Operation("Samples", answers.training.SampleReceipt, schemas.Sample, errors=(422, 429, 503)),
    futures.retrieve_future: Operation(
        "A result, by a long poll; in protobuf if the header Accept names it",
        dict[str, Any],
        schemas.RetrieveFuture,
        errors=(410,),
        also_answers={PROTOBUF: BINARY},
    ),
    futures.retrieve_futures: Operation(
        "Which samples of a sampler are done, by a long poll",
        answers.training.Completions,
        schemas.RetrieveFutures,
        errors=(404, 410),
    ),
    futures.cancel_future: Operation("Stop a sample", answers.service.Empty, schemas.CancelFuture),
    # Management
    runs.list_training_runs: Operation(
        "Training runs", answers.checkpoints.TrainingRunPage, query=schemas.RunsQuery, errors=(400,)
    ),
    runs.get_training_run: Operation(
        "A training run", answers.checkpoints.TrainingRun, query=schemas.ScopedQuery, errors=(400, 404)
    ),
    runs.list_checkpoints_of_run: Operation(
        "Checkpoints of a training run", answers.checkpoints.CheckpointList, errors=(404,)
    ),
    runs.list_checkpoints: Operation(
        "Checkpoints", answers.checkpoints.CheckpointPage, query=schemas.CheckpointsQuery, errors=(400,)
    ),
    checkpoints.delete: Operation("Delete a checkpoint", answers.service.Empty, errors=_CHECKPOINT),
    checkpoints.show: Operation(
        "A checkpoint and its files", answers.checkpoints.CheckpointDetails, errors=_CHECKPOINT
    ),
    checkpoints.verify: Operation(
        "Read all files of a checkpoint and compare them with their checksums",
        answers.checkpoints.Verified,
        errors=_CHECKPOINT,
    ),
    checkpoints.pin: Operation(
        "Pin a checkpoint: neither retention nor TTL deletes it", answers.service.Empty, errors=_CHECKPOINT
    ),
    checkpoints.unpin: Operation("Unpin a checkpoint", answers.service.Empty, errors=_CHECKPOINT),
    retention.get_retention: Operation(
        "The retention policy of a training run, and what it would delete now",
        answers.checkpoints.Retention,
        errors=(404,),
    ),
    retention.set_retention: Operation(
        "Set the retention policy of a training run",
        answers.checkpoints.Retention,
        schemas.Policy,
        errors=(404,),
    ),
    retention.use_default_retention: Operation(
        "Go back to the server's retention policy", answers.checkpoints.Retention, errors=(404,)
    ),
    retention.prune: Operation(
        "Delete the checkpoints that a policy does not keep, or list them",
        answers.checkpoints.Pruned,
        schemas.Prune,
        errors=(404,),
    ),
    checkpoints.publish: Operation("Publish a checkpoint", answers.service.Empty, errors=_CHECKPOINT),
    checkpoints.unpublish: Operation("Unpublish a checkpoint", answers.service.Empty, errors=_CHECKPOINT),
    checkpoints.set_ttl: Operation(
        "Set when a checkpoint expires", answers.service.Empty, schemas.SetTtl, errors=(404, 503)
    ),
    checkpoints.external_weights_urls: Operation(
        "Signed URLs of a checkpoint's files", answers.checkpoints.SignedUrls, errors=_CHECKPOINT
    ),
    checkpoints.archive: Operation(
        "Signed URL of an archive of a checkpoint", answers.checkpoints.SignedUrl, errors=_CHECKPOINT, status=302
    ),
    checkpoints.certificate: Operation(
        "Certificate of a checkpoint: how far the samplers were from the trainer at the last publish",
        answers.checkpoints.Certificate,
        errors=_CHECKPOINT,
    ),
    downloads.checkpoint_file: Operation(
        "A file, by its signed URL",
        query=bodies.SignedQuery,
        errors=(403, 404, 410, 503),
        also_answers={"application/octet-stream": BINARY},
        needs_key=False,
    ),
    downloads.archive: Operation(
        "An archive, by its signed URL",
        query=bodies.SignedQuery,
        errors=(403, 404, 410, 503),
        also_answers={"application/x-tar": BINARY},
        needs_key=False,
    ),
    downloads.trace: Operation(
        "A timeline, by its signed URL",
        dict[str, Any],
        query=bodies.SignedQuery,
        errors=(403, 404, 410),
        needs_key=False,
    ),
    admin.audit: Operation("Audit log of a day", answers.records.AuditLog, query=schemas.AuditQuery, errors=(400,)),
    admin.billing_usage: Operation(
        "Usage by hour", answers.records.UsageEvents, query=schemas.UsageQuery, errors=(400,)
    ),
    admin.checkpoint_storage: Operation(
        "Stored checkpoints and their size", answers.records.Storage, query=schemas.StorageQuery
    ),
    # OpenAI
    openai.list_models: Operation("Base models and the newest checkpoints", answers.openai.ModelCards),
    openai.get_model: Operation("A base model or a checkpoint", answers.openai.ModelCard, errors=(400, 404, 503)),
    openai.completions: Operation(
        "Continue text or tokens",
        answers.openai.Completion,
        openai_schemas.Completion,
        errors=(404, 429, 503),
        also_answers={"text/event-stream": {}},
    ),
    openai.chat_completions: Operation(
        "Answer in a conversation",
        answers.openai.ChatCompletion,
        openai_schemas.Chat,
        errors=(404, 429, 503),
        also_answers={"text/event-stream": {}},
    ),
    openai.responses: Operation(
        "Answer items of a conversation",
        answers.openai.Response,
        openai_schemas.Respond,
        errors=(404, 429, 503),
        also_answers={"text/event-stream": {}},
    ),
}
