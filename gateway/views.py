"""Functions that make the JSON of the public API from rows. The types of this JSON are those of the OpenAPI
document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from gateway.answers import checkpoints as answers
from gateway.answers import training
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.sessions import Model, Session
from tinsmith.rpc.paths import KINDS
from tinsmith.rpc.times import seconds_of
from tinsmith.v1 import types_pb2

Json = dict[str, Any]

_USER = "tml:organization_user:"
DEFAULT_PROJECT = "default"
"""Project of sessions that name none; in the public API every session has a project."""


def time_text(at: float) -> str:
    """A time in seconds since 1970 as ISO 8601, UTC, to the microsecond."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def urn_of(owner: str) -> str:
    """The owner's name in the public API."""
    return _USER + owner


def owner_of_urn(urn: str) -> str:
    return urn.removeprefix(_USER)


def checkpoint_view(checkpoint: Checkpoint) -> answers.CheckpointFacts:
    return {
        "checkpoint_id": checkpoint.path.split("/", 3)[3],
        "checkpoint_type": KINDS[checkpoint.kind],
        "time": time_text(checkpoint.created_at),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata or None,
        "expires_at": None if checkpoint.expires_at is None else time_text(checkpoint.expires_at),
    }


def file_view(file: types_pb2.CheckpointFile) -> answers.FileFacts:
    return {"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256}


def checkpoint_details(checkpoint: Checkpoint, files: Sequence[types_pb2.CheckpointFile]) -> answers.CheckpointDetails:
    return {
        **checkpoint_view(checkpoint),
        "base_model": checkpoint.base_model,
        "version_id": checkpoint.version_id,
        "step": checkpoint.step,
        **lora_view(checkpoint.lora_rank),
        "optimizer": checkpoint.optimizer if checkpoint.has_optimizer else None,
        "pinned": checkpoint.pinned,
        "files": [file_view(file) for file in files],
    }


_APPLIED: dict[int, Literal["yes", "too weak to tell", "no", "differently"] | None] = {
    types_pb2.APPLIED_UNSPECIFIED: None,
    types_pb2.APPLIED_YES: "yes",
    types_pb2.APPLIED_TOO_WEAK_TO_TELL: "too weak to tell",
    types_pb2.APPLIED_NO: "no",
    types_pb2.APPLIED_DIFFERENTLY: "differently",
}


def certificate_view(certificate: types_pb2.PublishCertificate) -> answers.Certificate:
    """The certificate as JSON. A gap or a change that is not finite becomes the text "inf", as in metrics."""
    return {
        "version_id": certificate.version_id,
        "passed": certificate.passed,
        "limit": certificate.limit or None,
        "mean_limit": certificate.mean_limit or None,
        "change": certificate.change if math.isfinite(certificate.change) else "inf",
        "samplers": [
            {
                "address": gap.address,
                "engine": gap.engine,
                "max_gap": gap.max_gap if math.isfinite(gap.max_gap) else "inf",
                "mean_gap": gap.mean_gap if math.isfinite(gap.mean_gap) else "inf",
                "num_tokens": gap.num_tokens,
                "applied": _APPLIED[gap.applied],
                "factor": gap.factor if gap.HasField("factor") else None,
            }
            for gap in certificate.samplers
        ],
        "weights_hash": certificate.weights_hash,
        "num_bytes": certificate.num_bytes,
        "publish_seconds": seconds_of(certificate.publish_time),
        "issued_at": time_text(seconds_of(certificate.issued_at)),
    }


def lora_view(rank: int | None) -> answers.Lora:
    """The LoRA fields of a model or checkpoint. Rank 0 means that all parameters are trained."""
    return {"is_lora": rank != 0, "lora_rank": rank or None}


def run_view(
    model: Model, owner: str, *, last: Checkpoint | None, last_sampler: Checkpoint | None
) -> answers.TrainingRun:
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": urn_of(owner),
        **lora_view(model.lora_rank),
        "corrupted": False,
        "last_request_time": time_text(model.last_request_at or model.created_at),
        "last_checkpoint": None if last is None else checkpoint_view(last),
        "last_sampler_checkpoint": None if last_sampler is None else checkpoint_view(last_sampler),
        "user_metadata": model.user_metadata or None,
    }


def status_view(session: Session) -> Json | None:
    """The session's status. None for a session that ended for want of heartbeats, because its client may have finished
    or not."""
    if session.ended_at is None:
        return {"type": "active"}
    if session.end_reason in FINISH_REASONS:
        return {"type": "client_finished", "reason": {"type": session.end_reason}, "detail": session.end_detail}
    return None


FINISH_REASONS = ("success", "errored", "interrupted")


def session_view(session: Session, *, num_checkpoints: int, num_bytes: int) -> training.SessionFacts:
    return {
        "session_id": session.session_id,
        "created_at": time_text(session.created_at),
        "owner": urn_of(session.owner),
        "project_id": session.project_id or DEFAULT_PROJECT,
        "status": status_view(session),
        "checkpoints_count": num_checkpoints,
        "display_name": session.display_name,
        "user_metadata": session.user_metadata or None,
        "checkpoint_storage_bytes": num_bytes,
    }


def page_view(*, offset: int, limit: int, total: int) -> answers.Page:
    return {"offset": offset, "limit": limit, "total_count": total}
