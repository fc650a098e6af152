"""Takes an HTTP request of a training operation to its receipt.

A mistake inside such a request fails its future and not the request itself. The client goes on with the next `seq_id`
either way, and a 4xx on one of several chunks would leave it waiting for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import Message
from starlette.responses import Response

from gateway.database.tables.sessions import Model
from gateway.gateway import Gateway
from gateway.http import schemas
from gateway.http.body import Schema, fingerprint, parse, parse_ids
from gateway.http.errors import json_response
from gateway.tenants.access import refused_id
from gateway.tenants.caller import Caller
from gateway.tenants.limits import Hold, Size
from gateway.training.operations import Submission, refusal_body, request_id_of
from tinsmith.rpc.errors import BudgetExceeded, ModelNotFound, NotReady, ServiceError
from tinsmith.rpc.paths import TinkerPath


@dataclass(frozen=True, slots=True)
class Rpc:
    """The trainer's RPC that a request becomes."""

    name: str
    body: bytes
    """The request's canonical bytes."""
    path: str | None = None
    """Tinker path that the RPC loads or saves."""
    sampling_session_id: str | None = None
    """Set for an ephemeral save."""
    inflight: bool = False
    """A save with kind "inflight"."""
    is_forward_only: bool = False
    """A batch without gradients."""
    is_completed: bool = False
    """The gateway has added what the client only names (see `references`)."""


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


async def failed_receipt(
    gateway: Gateway, request_id: str, model_id: str, error: ServiceError, *, kind: str, mark: str
) -> Response:
    """The receipt of a request that has failed already, and that the trainer need not know of."""
    await gateway.training.refusals.add(request_id, error, group=model_id, kind=kind, mark=mark)
    return receipt(request_id, model_id)


async def submit_json(
    gateway: Gateway,
    caller: Caller,
    content: dict[str, Any],
    body: bytes,
    *,
    kind: str,
    schema: type[Schema],
    convert: Callable[[Schema], Awaitable[Rpc]],
) -> Response:
    """Submits a JSON body with `model_id`, and numbers it if it has no `seq_id`. `content` is `body`, parsed."""
    with gateway.tenants.limits.reading(caller):
        given = parse_ids(schemas.GivenIds, content)
    if given.seq_id is None:
        model = await gateway.tenants.access.model(given.model_id, caller)
        if model is None:
            return no_model(gateway, caller, given.model_id, None)
        async with gateway.training.numbers.next(model) as seq_id:
            numbered = {**content, "seq_id": seq_id}
            return await submit_json(gateway, caller, numbered, body, kind=kind, schema=schema, convert=convert)
    ids = parse_ids(schemas.OperationIds, content)
    if await gateway.tenants.access.model(ids.model_id, caller) is None:  # `convert` may rely on the model
        return no_model(gateway, caller, ids.model_id, None)
    try:
        rpc = await convert(parse(schema, content))
    except NotReady:
        raise
    except ServiceError as error:
        return await submit(gateway, caller, kind=kind, ids=ids, rpc=error, mark=fingerprint(kind, body))
    mark = fingerprint(kind, rpc.body, rpc.path, rpc.sampling_session_id, "inflight" if rpc.inflight else "")
    return await submit(gateway, caller, kind=kind, ids=ids, rpc=rpc, mark=mark)


def no_model(gateway: Gateway, caller: Caller, model_id: str, model: Model | None) -> Response:
    """The receipt of a failed future, for a model that cannot be trained. Raises RateLimited.

    `model`: None when the caller has no such model.
    """
    gateway.tenants.limits.count(caller)
    why = "its session has ended, or it is a copy"
    if model is None:
        why = "there is no such model"
    elif model.ended_at is not None:
        why = "the run has ended"
    error = ModelNotFound(f"model_id: {model_id!r} cannot be trained: {why}", model_id=model_id)
    return receipt(refused_id(caller, error), model_id)


async def _admit(gateway: Gateway, caller: Caller, model: Model, request_id: str, rpc: Rpc, *, num_tokens: int) -> Hold:
    """Reserves what the operation may use of its owner's budgets. Raises RateLimited and BudgetExceeded."""
    whose = await gateway.store.sessions.whose(model.session_id)
    assert whose is not None
    if rpc.sampling_session_id is not None:
        limit = gateway.config.max_sampling_sessions
        if not await gateway.store.samplers.take_place(whose.owner, limit=limit):
            raise BudgetExceeded(
                f"{whose.owner!r} has {limit} sampling sessions, which is max_sampling_sessions; those of ended "
                "sessions are forgotten after a while",
                budget="sampling_sessions",
                limit=limit,
            )
    hold = gateway.tenants.limits.start(whose.owner)
    try:
        if rpc.name == "SaveCheckpoint" and rpc.path is not None:
            size: Size = None
            if gateway.tenants.limits.has_quota(whose.owner):
                kind = TinkerPath.parse(rpc.path, field="path").kind
                names = gateway.clients.names_of(model.base_model)
                size = partial(gateway.catalog.size_of_save, model, kind=kind, base_models=names)
            await gateway.tenants.limits.store(hold, rpc.path, num_bytes=size, request_id=request_id)
        return gateway.tenants.limits.operation(caller, request_id, owner=whose.owner, tokens=num_tokens, hold=hold)
    except BaseException:
        hold.release()
        raise


async def submit(
    gateway: Gateway,
    caller: Caller,
    *,
    kind: str,
    ids: schemas.OperationIds,
    rpc: Rpc | ServiceError,
    mark: str,
    num_tokens: int = 0,
    sends_parts_at_once: bool = True,
) -> Response:
    """The receipt, once the trainer has the operation, or the SkipOperation of a refused one, in its journal.

    `rpc`: what the trainer is to do, or the gateway's reason to refuse the request. `mark`: fingerprint of the request,
    by which a repeat is known. Raises what `Operations.submit` raises, and RateLimited.
    """
    model = await gateway.tenants.access.model(ids.model_id, caller)
    is_over = model is None or model.ended_at is not None or model.released_at is not None
    if model is None or is_over or not await gateway.store.sessions.lives(model.session_id):
        return no_model(gateway, caller, ids.model_id, model)
    request_id = request_id_of(ids.model_id, ids.seq_id)
    hold: Hold | None = None
    if not isinstance(rpc, ServiceError) and gateway.futures.fingerprint(request_id) is None:
        try:
            hold = await _admit(gateway, caller, model, request_id, rpc, num_tokens=num_tokens)
        except BudgetExceeded as error:
            rpc = error
    if hold is None:  # refusals and repeats count against the rates, too
        gateway.tenants.limits.operation(caller, request_id, owner=caller.owner, tokens=0).release()
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
        is_forward_only=rpc.is_forward_only,
        is_completed=rpc.is_completed,
        sends_parts_at_once=sends_parts_at_once,
        num_tokens=num_tokens,
        error=error,
        hold=hold,
    )
    try:
        await gateway.training.operations.submit(submission)
    finally:
        pending = gateway.futures.pending(request_id)
        if hold is not None and (pending is None or pending.hold is not hold):
            hold.release()
    return receipt(submission.request_id, ids.model_id)
