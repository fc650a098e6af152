"""From an HTTP request with a seq_id to its receipt.

Whatever is wrong inside such a request fails its future and not the request itself: the client goes on with the next
seq_id either way, and a 4xx on one of several chunks would leave it waiting for ever.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from google.protobuf.message import Message
from starlette.responses import Response

from gateway import schemas
from gateway.body import Schema, fingerprint, parse
from gateway.errors import json_response
from gateway.gateway import Gateway
from gateway.operations import Submission, refusal_body, request_id_of
from tinsmith.rpc.errors import ModelNotFound, NotReady, SequenceConflict, ServiceError

_MODEL_ID = re.compile(r"[^/\s]+:train:\d+")


@dataclass(frozen=True, slots=True)
class Rpc:
    """What a request asks of the trainer."""

    name: str
    body: bytes
    """The request's canonical bytes."""
    path: str | None = None
    """Tinker path that it loads or saves."""
    sampling_session_id: str | None = None
    """Set for an ephemeral save."""
    inflight: bool = False
    """A save with kind "inflight"."""
    is_completed: bool = False
    """The gateway has put things into the body that the client only names."""


def rpc_of(
    name: str,
    message: Message,
    *,
    path: str | None = None,
    sampling_session_id: str | None = None,
    inflight: bool = False,
) -> Rpc:
    return Rpc(name, message.SerializeToString(deterministic=True), path, sampling_session_id, inflight)


def receipt(request_id: str, model_id: str) -> Response:
    return json_response({"request_id": request_id, "model_id": model_id})


def failed_receipt(gateway: Gateway, request_id: str, model_id: str, error: ServiceError, *, mark: str) -> Response:
    """A receipt for what has failed already, and that the trainer need not know of."""
    if gateway.futures.fingerprint(request_id) not in (None, mark):
        raise SequenceConflict(f"{request_id} was used by another request before; this one was not run ({error})")
    gateway.futures.fail(request_id, error, fingerprint=mark)
    return receipt(request_id, model_id)


async def submit_json(
    gateway: Gateway,
    content: dict[str, Any],
    body: bytes,
    *,
    kind: str,
    schema: type[Schema],
    convert: Callable[[Schema], Awaitable[Rpc]],
) -> Response:
    """For a JSON body with model_id and seq_id: `content` is what `body` holds."""
    ids = parse(schemas.OperationIds, content)
    try:
        rpc = await convert(parse(schema, content))
    except NotReady:
        raise
    except ServiceError as error:
        return await submit(gateway, kind=kind, ids=ids, rpc=error, mark=fingerprint(kind, body))
    mark = fingerprint(kind, rpc.body, rpc.path, rpc.sampling_session_id, "inflight" if rpc.inflight else "")
    return await submit(gateway, kind=kind, ids=ids, rpc=rpc, mark=mark)


async def submit(
    gateway: Gateway, *, kind: str, ids: schemas.OperationIds, rpc: Rpc | ServiceError, mark: str, num_tokens: int = 0
) -> Response:
    """The receipt, once the trainer has the operation, or the refusal, in its journal."""
    model = await gateway.store.model(ids.model_id)
    if model is None or model.released_at is not None:
        why = "there is no such model" if model is None else "its session has ended, or it is a copy"
        error = ModelNotFound(f"model_id: {ids.model_id!r} cannot be trained: {why}", model_id=ids.model_id)
        # An id of another form must not take the place of one that a sample may get.
        well_formed = _MODEL_ID.fullmatch(ids.model_id) is not None
        request_id = request_id_of(ids.model_id, ids.seq_id) if well_formed else f"refused:{uuid4().hex}"
        return failed_receipt(gateway, request_id, ids.model_id, error, mark=mark)
    error = rpc if isinstance(rpc, ServiceError) else None
    if isinstance(rpc, ServiceError):
        rpc = Rpc("SkipOperation", refusal_body(kind, ids.model_id, ids.seq_id, rpc))
    submission = Submission(
        kind=kind,
        model_id=ids.model_id,
        seq_id=ids.seq_id,
        base_model=model.base_model,
        rpc=rpc.name,
        body=rpc.body,
        fingerprint=mark,
        path=rpc.path,
        sampling_session_id=rpc.sampling_session_id,
        inflight=rpc.inflight,
        is_completed=rpc.is_completed,
        num_tokens=num_tokens,
        error=error,
    )
    await gateway.operations.submit(submission)
    return receipt(submission.request_id, ids.model_id)
