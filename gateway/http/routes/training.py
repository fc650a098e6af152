"""Training operations: the routes of gradients and optimizer steps, and the way from a body to its receipt.

A mistake inside such a request fails its future and not the request itself. The client goes on with the next `seq_id`
either way, and a 4xx on one of several chunks would leave it waiting for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import convert, schemas
from gateway.codec import caller_of, gateway_of, json_response, off_loop, sends_parts_at_once
from gateway.database.tables.sessions import Model
from gateway.gateway import Gateway
from gateway.http.body import Schema, parse, parse_ids, read_forward_backward, read_json
from gateway.ids import fingerprint
from gateway.tenants.access import refused_id
from gateway.tenants.caller import Caller
from gateway.tenants.limits import Hold, Size
from gateway.training import provenance
from gateway.training.operations import Submission
from tinsmith.errors import BudgetExceeded, ModelNotFound, NotReady, ServiceError
from tinsmith.rpc.paths import TinkerPath
from tinsmith.v1 import trainer_pb2

Convert = Callable[[Submission, Schema], Awaitable[None]]
"""Sets the trainer's RPC of a submission, by its validated body. Raises ServiceError for a mistake in it."""


async def forward_backward(request: Request) -> Response:
    """A batch, in protobuf or in the JSON of older SDKs."""
    return await _submit_batch(request, forward_only=False)


async def forward(request: Request) -> Response:
    """A batch without gradients; newer SDKs send forward_backward with forward_only instead."""
    return await _submit_batch(request, forward_only=True)


async def _submit_batch(request: Request, *, forward_only: bool) -> Response:
    gateway, caller = gateway_of(request), caller_of(request)
    with gateway.tenants.limits.reading(caller):
        batch = await read_forward_backward(request, gateway.config, forward_only=forward_only)
        given = parse(schemas.GivenIds, {"model_id": batch.model_id, "seq_id": batch.seq_id or None})
    batch.sends_parts_at_once = sends_parts_at_once(request)
    model = await gateway.tenants.access.model(given.model_id, caller)
    if model is None:
        return no_model(gateway, caller, given.model_id, None)
    if given.seq_id is not None:
        return await _submit_numbered(gateway, caller, batch)
    async with gateway.training.numbers.next(model) as seq_id:
        batch.number(seq_id)
        return await _submit_numbered(gateway, caller, batch)


async def _submit_numbered(gateway: Gateway, caller: Caller, batch: Submission) -> Response:
    if batch.error is None and batch.loss_fn in ("custom", "stable_reinforce"):
        try:
            await _complete(gateway, batch)
        except NotReady:
            raise
        except ServiceError as error:
            if batch.is_forward_only:
                batch.kind = "forward"
            batch.refuse(error)
    return await submit(gateway, caller, batch)


async def _complete(gateway: Gateway, batch: Submission) -> None:
    """Adds what a batch only names: the stored loss of a "custom" batch, and the recorded logprobs of a
    "stable_reinforce" batch.

    Raises InvalidRequest or Unsupported, naming the field.
    """
    session_id, num_bytes = batch.session_id, len(batch.body)
    message = await off_loop(
        lambda: trainer_pb2.ForwardBackwardRequest.FromString(batch.body), num_bytes=num_bytes, config=gateway.config
    )
    # A repeat may have other bytes; the trainer cannot tell, because the gateway adds to them.
    batch.fingerprint = fingerprint("forward_backward", message.SerializeToString(deterministic=True))
    if batch.loss_fn == "custom":
        await gateway.training.custom_losses.attached(message, session_id=session_id)
    else:
        records = await gateway.sampling.records.find(provenance.sequence_ids(message), session_id=session_id)
        await off_loop(lambda: provenance.resolve(message, records), num_bytes=num_bytes, config=gateway.config)
    await off_loop(lambda: batch.calls("ForwardBackward", message), num_bytes=num_bytes, config=gateway.config)
    batch.is_completed = True


async def optim_step(request: Request) -> Response:
    async def to_rpc(step: Submission, body: schemas.OptimStep) -> None:
        step.calls("OptimStep", convert.optim_step(body))

    return await submit_json(request, "optim_step", schemas.OptimStep, to_rpc)


# From a body to its receipt


def receipt(request_id: str, model_id: str) -> Response:
    return json_response({"request_id": request_id, "model_id": model_id})


async def failed_receipt(
    gateway: Gateway, request_id: str, model_id: str, error: ServiceError, *, kind: str, mark: str
) -> Response:
    """The receipt of a request that has failed already, and that the trainer need not know of."""
    await gateway.training.refusals.add(request_id, error, group=model_id, kind=kind, mark=mark)
    return receipt(request_id, model_id)


async def submit_json(request: Request, kind: str, schema: type[Schema], convert: Convert[Schema]) -> Response:
    """Reads and submits a JSON body with `model_id`, and numbers it if it has no `seq_id`."""
    gateway, caller = gateway_of(request), caller_of(request)
    with gateway.tenants.limits.reading(caller):
        content, body = await read_json(request, gateway.config)
    return await submit_content(gateway, caller, content, body, kind=kind, schema=schema, convert=convert)


async def submit_content(
    gateway: Gateway,
    caller: Caller,
    content: dict[str, Any],
    body: bytes,
    *,
    kind: str,
    schema: type[Schema],
    convert: Convert[Schema],
) -> Response:
    """`submit_json` of a body that is read. `content` is `body`, parsed."""
    with gateway.tenants.limits.reading(caller):
        given = parse_ids(schemas.GivenIds, content)
    model = await gateway.tenants.access.model(given.model_id, caller)
    if given.seq_id is None:
        if model is None:
            return no_model(gateway, caller, given.model_id, None)
        async with gateway.training.numbers.next(model) as seq_id:
            numbered = {**content, "seq_id": seq_id}
            return await submit_content(gateway, caller, numbered, body, kind=kind, schema=schema, convert=convert)
    ids = parse_ids(schemas.OperationIds, content)
    if model is None:  # `convert` may rely on the model
        return no_model(gateway, caller, ids.model_id, None)
    submission = Submission.of(kind, ids.model_id, ids.seq_id)
    try:
        await convert(submission, parse(schema, content))
        submission.fingerprint = fingerprint(
            kind,
            submission.body,
            submission.path,
            submission.sampling_session_id,
            "inflight" if submission.inflight else "",
        )
    except NotReady:
        raise
    except ServiceError as error:
        submission.fingerprint = fingerprint(kind, body)
        submission.refuse(error)
    return await submit(gateway, caller, submission)


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


async def _admit(gateway: Gateway, caller: Caller, model: Model, submission: Submission) -> Hold:
    """Reserves what the operation may use of its owner's budgets. Raises RateLimited and BudgetExceeded."""
    whose = await gateway.store.sessions.whose(model.session_id)
    assert whose is not None
    if submission.sampling_session_id is not None:
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
        if submission.rpc == "SaveCheckpoint" and submission.path is not None:
            size: Size = None
            if gateway.tenants.limits.has_quota(whose.owner):
                kind = TinkerPath.parse(submission.path, field="path").kind
                names = gateway.clients.names_of(model.base_model)
                size = partial(gateway.catalog.size_of_save, model, kind=kind, base_models=names)
            await gateway.tenants.limits.store(hold, submission.path, num_bytes=size, request_id=submission.request_id)
        return gateway.tenants.limits.operation(
            caller, submission.request_id, owner=whose.owner, tokens=submission.num_tokens, hold=hold
        )
    except BaseException:
        hold.release()
        raise


async def submit(gateway: Gateway, caller: Caller, submission: Submission) -> Response:
    """The receipt, once the trainer has the operation, or the SkipOperation of a refused one, in its journal.

    Raises what `Operations.submit` raises, and RateLimited.
    """
    model_id, request_id = submission.model_id, submission.request_id
    model = await gateway.tenants.access.model(model_id, caller)
    is_over = model is None or model.ended_at is not None or model.released_at is not None
    if model is None or is_over or not await gateway.store.sessions.lives(model.session_id):
        return no_model(gateway, caller, model_id, model)
    submission.base_model = model.base_model
    if submission.error is None and gateway.futures.fingerprint(request_id) is None:
        try:
            submission.hold = await _admit(gateway, caller, model, submission)
        except BudgetExceeded as error:
            submission.refuse(error)
    if submission.hold is None:  # refusals and repeats count against the rates, too
        gateway.tenants.limits.operation(caller, request_id, owner=caller.owner, tokens=0).release()
    try:
        await gateway.training.operations.submit(submission)
    finally:
        if submission.hold is not None and gateway.futures.pending(request_id) is not submission:
            submission.hold.release()
    return receipt(request_id, model_id)


routes = [
    Route("/forward_backward", forward_backward, methods=["POST"]),
    Route("/forward", forward, methods=["POST"]),
    Route("/optim_step", optim_step, methods=["POST"]),
]
