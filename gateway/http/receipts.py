"""Takes the body of a training operation, and answers with its receipt, which the client gets once the trainer has the
operation.

A mistake inside such a request fails its future and not the request itself. The client goes on with the next `seq_id`
either way, and a 4xx on one of several chunks would leave it waiting for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException

from gateway import answers, schemas
from gateway.codec import Request, Schema, parse, parse_ids
from gateway.database.tables.sessions import Model
from gateway.gateway import Gateway
from gateway.ids import fingerprint
from gateway.tenants.access import Caller, refused_id
from gateway.tenants.limits import Hold, Size
from gateway.training.submission import Submission
from gateway.training.trainer_calls import TooFarAhead
from tinsmith.errors import BudgetExceeded, ModelNotFound, NotReady, RateLimited, ServiceError
from tinsmith.rpc.paths import TinkerPath

Convert = Callable[[Submission, Schema], Awaitable[None]]
"""Sets the trainer's RPC of a submission, by its validated body. Raises ServiceError for a mistake in it."""


@contextmanager
def counted_if_refused(gateway: Gateway, caller: Caller) -> Iterator[None]:
    """A context in which the body of a training operation is read. Counts the request when the block refuses it.

    A request that is not refused counts in `Limits.operation`. Raises RateLimited.
    """
    try:
        yield
    except (ServiceError, HTTPException) as error:
        try:
            gateway.tenants.limits.count(caller)
        except RateLimited as limited:
            raise limited from error
        raise


def receipt(request_id: str, model_id: str) -> answers.training.Receipt:
    return {"request_id": request_id, "model_id": model_id}


async def failed_receipt(
    gateway: Gateway, request_id: str, model_id: str, error: ServiceError, *, kind: str, mark: str
) -> answers.training.Receipt:
    """The receipt of a request that has failed already, and that the trainer need not know of."""
    await gateway.training.refusals.add(request_id, error, group=model_id, kind=kind, mark=mark)
    return receipt(request_id, model_id)


async def submit_json(
    request: Request, kind: str, schema: type[Schema], convert: Convert[Schema]
) -> answers.training.Receipt:
    """Reads and submits a JSON body with `model_id`, and numbers it if it has no `seq_id`."""
    with counted_if_refused(request.gateway, request.caller):
        content = await request.json_object()
    return await submit_content(request, content, kind=kind, schema=schema, convert=convert)


async def submit_content(
    request: Request, content: dict[str, Any], *, kind: str, schema: type[Schema], convert: Convert[Schema]
) -> answers.training.Receipt:
    """Submits a JSON body that was read before, as `submit_json` does."""
    gateway, caller = request.gateway, request.caller
    with counted_if_refused(gateway, caller):
        given = parse_ids(schemas.GivenIds, content)
    model = await gateway.tenants.access.model(given.model_id, caller)
    if given.seq_id is None:
        if model is None:
            return no_model(gateway, caller, given.model_id, None)
        async with gateway.training.numbers.next(model) as seq_id:
            numbered = {**content, "seq_id": seq_id}
            return await submit_content(request, numbered, kind=kind, schema=schema, convert=convert)
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
            # The number of the sampling session is left out, because the SDK takes a new number each time it sends an
            # ephemeral save again. It goes on with the sampling session that the answer names.
            "ephemeral" if submission.sampling_session_id is not None else "",
            "inflight" if submission.inflight else "",
        )
    except NotReady:
        raise
    except ServiceError as error:
        submission.fingerprint = fingerprint(kind, request.raw)
        submission.refuse(error)
    return await submit(gateway, caller, submission)


def no_model(gateway: Gateway, caller: Caller, model_id: str, model: Model | None) -> answers.training.Receipt:
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
    """Reserves the most that the operation may use of its owner's budgets. Raises RateLimited and BudgetExceeded."""
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


async def submit(gateway: Gateway, caller: Caller, submission: Submission) -> answers.training.Receipt:
    """The receipt, once the trainer's journal has the operation, or the SkipOperation of a refused one.

    Raises the errors of `Operations.submit`, and RateLimited.
    """
    model_id, request_id = submission.model_id, submission.request_id
    model = await gateway.tenants.access.model(model_id, caller, is_newest=True)  # another gateway may have ended it
    is_over = model is None or model.ended_at is not None or model.released_at is not None
    if model is None or is_over or not await gateway.store.sessions.lives(model.session_id):
        return no_model(gateway, caller, model_id, model)
    submission.base_model = model.base_model
    gateway.training.operations.arrives(submission)
    if submission.error is None and gateway.futures.fingerprint(request_id) is None:
        try:
            submission.hold = await _admit(gateway, caller, model, submission)
        except BudgetExceeded as error:
            submission.refuse(error)
    if submission.hold is None:  # refusals and repeats count against the rates, too
        gateway.tenants.limits.operation(caller, request_id, owner=caller.owner, tokens=0).release()
    try:
        await gateway.training.operations.submit(submission)
    except TooFarAhead as error:
        return receipt(refused_id(caller, error), model_id)
    finally:
        if submission.hold is not None and gateway.futures.pending(request_id) is not submission:
            submission.hold.release()
    return receipt(request_id, model_id)
