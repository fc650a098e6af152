"""Training operations: the routes of gradients and optimizer steps, and the way from a body to its receipt.

A mistake inside such a request fails its future and not the request itself. The client goes on with the next `seq_id`
either way, and a 4xx on one of several chunks would leave it waiting for ever.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import zstandard
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from starlette.exceptions import HTTPException

from gateway import answers, convert, json_forms, schemas
from gateway.assets import pointers_of_batch
from gateway.codec import (
    IDS_BYTES,
    Request,
    Schema,
    TooLarge,
    check_values,
    json_object,
    off_loop,
    parse,
    parse_ids,
    protobuf_values,
    read,
    sends_parts_at_once,
    too_many_bytes,
)
from gateway.config import GatewayConfig
from gateway.database.tables.sessions import Model
from gateway.gateway import Gateway
from gateway.http import openapi_bodies
from gateway.http.endpoint import BINARY, POST, PROTOBUF, SUBMISSION
from gateway.ids import batch_fingerprint, fingerprint
from gateway.load import Share
from gateway.tenants.access import Caller, refused_id
from gateway.tenants.limits import Hold, Size
from gateway.training import provenance
from gateway.training.operations import Submission, TooFarAhead
from tinsmith.errors import (
    BudgetExceeded,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    OutOfCapacity,
    RateLimited,
    ServiceError,
)
from tinsmith.rpc.parts import check_parts
from tinsmith.rpc.paths import TinkerPath
from tinsmith.v1 import trainer_pb2

_MAX_WINDOW_BYTES = 2**23
"""Largest window of a zstd frame that is read piece by piece; RFC 8878 asks decoders for this much."""

Convert = Callable[[Submission, Schema], Awaitable[None]]
"""Sets the trainer's RPC of a submission, by its validated body. Raises ServiceError for a mistake in it."""


async def forward_backward(request: Request) -> answers.training.Receipt:
    """Add gradients of a batch.

    In protobuf, or in the JSON of older SDKs.
    """
    return await _submit_batch(request, forward_only=False)


async def forward(request: Request) -> answers.training.Receipt:
    """The losses of a batch, without gradients; for SDKs before 0.25.

    Newer SDKs send forward_backward with forward_only instead.
    """
    return await _submit_batch(request, forward_only=True)


async def _submit_batch(request: Request, *, forward_only: bool) -> answers.training.Receipt:
    async with AsyncExitStack() as turn:  # of a large body, until the trainer has it
        return await _submit_read(request, turn, forward_only=forward_only)


async def _submit_read(request: Request, turn: AsyncExitStack, *, forward_only: bool) -> answers.training.Receipt:
    gateway, caller = request.gateway, request.caller
    with counted_if_refused(gateway, caller):
        batch = await _read_batch(request, gateway.config, turn, forward_only=forward_only)
        given = parse(schemas.GivenIds, {"model_id": batch.model_id, "seq_id": batch.seq_id or None})
    batch.sends_parts_at_once = sends_parts_at_once(request)
    model = await gateway.tenants.access.model(given.model_id, caller)
    if model is None:
        return no_model(gateway, caller, given.model_id, None)
    batch.num_tokens += convert.tokens_of_pictures(batch.picture_sizes, gateway.clients.counting(model.base_model))
    if given.seq_id is not None:
        return await _submit_numbered(gateway, caller, batch)
    async with gateway.training.numbers.next(model) as seq_id:
        batch.number(seq_id)
        return await _submit_numbered(gateway, caller, batch)


async def _submit_numbered(gateway: Gateway, caller: Caller, batch: Submission) -> answers.training.Receipt:
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


async def optim_step(request: Request) -> answers.training.Receipt:
    """Apply the gradients."""

    async def to_rpc(step: Submission, body: schemas.OptimStep) -> None:
        step.calls("OptimStep", convert.optim_step(body))

    return await submit_json(request, "optim_step", schemas.OptimStep, to_rpc)


# Reading a batch


async def _read_batch(
    request: Request, config: GatewayConfig, turn: AsyncExitStack, *, forward_only: bool = False
) -> Submission:
    """Reads a batch in protobuf or JSON, by its content type. `turn`: gets the turn of a large body, which is not over
    at the return. `forward_only`: the endpoint is `forward`.

    A body without seq_id gets seq_id 0. A body that is too large, or whose JSON holds no batch, uses up its seq_id. So
    it becomes a refused submission with its ids. Raises TooLarge when the ids cannot be read, OutOfCapacity, and
    HTTPException 400 for another content type or encoding, a broken body, or a JSON body without ids.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in ("application/x-protobuf", "application/json"):
        raise HTTPException(
            400, f"content-type {content_type!r} is not supported; send application/x-protobuf or application/json"
        )
    is_json = content_type == "application/json"
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "zstd"):
        raise HTTPException(400, f"content-encoding {encoding!r} is not supported; use zstd or none")
    is_compressed = encoding == "zstd"
    try:
        body = await read(request, config)
    except TooLarge as error:
        return _too_large(error, is_json=is_json, is_compressed=is_compressed, forward_only=forward_only)

    def decode() -> Submission | _Named:
        try:
            plain = decompress(body, limit=config.max_body_bytes) if is_compressed else body
        except TooLarge as error:
            error.start = body
            return _too_large(error, is_json=is_json, is_compressed=True, forward_only=forward_only)
        try:
            return (_from_json if is_json else _from_protobuf)(plain, config, forward_only=forward_only)
        except TooLarge as error:
            return _too_large(error, is_json=is_json, is_compressed=False, forward_only=forward_only)

    num_bytes = len(body)
    if is_compressed:
        num_bytes = _decompressed_size(body, config)
        cast(Share, request.state.held).take(min(num_bytes, config.max_body_bytes))
    await turn.enter_async_context(request.turn(num_bytes))
    batch = await off_loop(decode, num_bytes=num_bytes, config=config)
    if isinstance(batch, Submission):
        return batch
    try:
        await request.gateway.assets.fill(batch.pointers, cast(Share, request.state.held))
    except OutOfCapacity:
        raise
    except ServiceError as error:
        return batch.refused(error)
    return await off_loop(batch.submission, num_bytes=num_bytes, config=config)


def _from_protobuf(body: bytes, config: GatewayConfig, *, forward_only: bool) -> Submission:
    """The batch. Its body stays as the client sent it; nothing in it is computed with here."""
    message = trainer_pb2.ForwardBackwardRequest()
    if len(body) > config.max_body_values:  # a smaller body cannot hold that many
        number = protobuf_values(body, cast(Descriptor, message.DESCRIPTOR), limit=config.max_body_values)
        check_values(number, body, config)
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise HTTPException(400, f"the body is not a ForwardBackwardRequest in protobuf: {error}") from None
    if (unknown := _unknown_field(message, body)) is not None:
        only = forward_only or message.forward_only
        return _refused(message.model_id, message.seq_id, unknown, "invalid", body, forward_only=only)
    if message.HasField("custom_loss"):
        error = InvalidRequest(
            "custom_loss: is not part of the public API; name a loss by loss_id", field="custom_loss"
        )
        only = forward_only or message.forward_only
        return _refused(message.model_id, message.seq_id, error, "forward_backward", body, forward_only=only)
    if forward_only and not message.forward_only:
        message.forward_only = True
        body += trainer_pb2.ForwardBackwardRequest(forward_only=True).SerializeToString()  # protobuf merges the two
    return _batch(message, body)


def _batch(message: trainer_pb2.ForwardBackwardRequest, body: bytes) -> Submission:
    num_tokens = sum(convert.num_tokens(datum.model_input, None) for datum in message.data)
    return Submission.of(
        "forward_backward",
        message.model_id,
        message.seq_id,
        rpc="ForwardBackward",
        body=body,
        fingerprint=batch_fingerprint(body),
        num_tokens=num_tokens,
        picture_sizes=[size for datum in message.data for size in convert.sizes_of_pictures(datum.model_input)],
        loss_fn=message.loss_fn,
        is_forward_only=message.forward_only,
    )


def _refused(model_id: str, seq_id: int, error: ServiceError, *parts: bytes | str, forward_only: bool) -> Submission:
    """A batch that the gateway refuses. `parts`: what tells its repeats from other requests."""
    # Refusing a forward loses no gradients.
    submission = Submission.of("forward" if forward_only else "forward_backward", model_id, seq_id)
    submission.fingerprint = fingerprint(*parts)
    submission.refuse(error)
    return submission


def _unknown_field(message: trainer_pb2.ForwardBackwardRequest, body: bytes) -> InvalidRequest | None:
    """The error for a message with an unknown field at any depth; None without one. Removes unknown fields."""
    is_outside = len(UnknownFieldSet(message)) > 0
    # Part by part: protobuf holds the interpreter's lock while it measures a message.
    parts = [*message.data, *message.loss_fn_config_v2.values(), message.custom_loss]
    num_bytes = sum(part.ByteSize() for part in parts)
    message.DiscardUnknownFields()
    if not is_outside and sum(part.ByteSize() for part in parts) == num_bytes:
        return None
    try:
        check_parts(body, cast(Descriptor, message.DESCRIPTOR))
    except InvalidRequest as error:
        return error
    return InvalidRequest("data: a field is not known here and cannot be applied; leave it out", field="data")


@dataclass(frozen=True, slots=True)
class _Named:
    """A batch in JSON, in which pictures may be named by their location."""

    content: dict[str, Any]
    model_id: str
    seq_id: int
    body: bytes
    forward_only: bool

    @property
    def pointers(self) -> list[tuple[str, dict[str, Any]]]:
        return list(pointers_of_batch(self.content.get(json_forms.key_of(forward_only=self.forward_only))))

    def submission(self) -> Submission:
        try:
            message = json_forms.forward_backward(
                self.content, model_id=self.model_id, seq_id=self.seq_id, forward_only=self.forward_only
            )
        except ServiceError as error:
            return self.refused(error)
        return _batch(message, message.SerializeToString(deterministic=True))

    def refused(self, error: ServiceError) -> Submission:
        return _refused(self.model_id, self.seq_id, error, "invalid", self.body, forward_only=self.forward_only)


def _from_json(body: bytes, config: GatewayConfig, *, forward_only: bool) -> Submission | _Named:
    """The batch; with its content where pictures have to be fetched first."""
    content = json_object(body, config)
    ids = parse_ids(schemas.GivenIds, content)
    batch = _Named(content, ids.model_id, ids.seq_id or 0, body, forward_only)
    return batch if batch.pointers else batch.submission()


def _too_large(error: TooLarge, *, is_json: bool, is_compressed: bool, forward_only: bool) -> Submission:
    start = error.start
    if is_compressed:
        try:
            decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
            start = decompressor.stream_reader(start).read(IDS_BYTES)
        except zstandard.ZstdError:
            raise error from None
    # The end of a compressed body cannot be decompressed alone.
    ids = _leading_ids(start) if not is_json else None if is_compressed else _trailing_ids(error.end)
    if ids is None:
        raise error
    refused = InvalidRequest(f"data: {error.detail}; send fewer or shorter datums", field="data")
    return _refused(*ids, refused, "too large", start, error.end, error.detail, forward_only=forward_only)


_TRAILING_IDS = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,300})"\s*,\s*"seq_id"\s*:\s*([0-9]{1,10})\s*\}\s*\Z')


def _trailing_ids(end: bytes) -> tuple[str, int] | None:
    """model_id and seq_id at the end of the JSON of a batch, in the order in which the SDKs write them."""
    match = _TRAILING_IDS.search(end)
    return None if match is None else (match[1].decode(errors="replace"), int(match[2]))


def _leading_ids(start: bytes) -> tuple[str, int] | None:
    """model_id and seq_id at the beginning of a ForwardBackwardRequest, whose rest may be cut off."""
    # Field 1 is a string, field 2 a varint, and a serializer writes them in this order.
    match = re.match(rb"\x0a([\x00-\x7f])", start)
    if match is None:
        return None
    end = 2 + match[1][0]
    number = re.match(rb"\x10([\x80-\xff]{0,4}[\x00-\x7f])", start[end:])
    if number is None:
        return None
    message = trainer_pb2.ForwardBackwardRequest()
    try:
        message.ParseFromString(start[: end + number.end()])
    except DecodeError:
        return None
    return message.model_id, message.seq_id


def _decompressed_size(body: bytes, config: GatewayConfig) -> int:
    """The decompressed size that a zstd frame declares; max_body_bytes when it declares none."""
    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError:
        return 0  # `decompress` will refuse it
    return config.max_body_bytes if size < 0 else size


def decompress(body: bytes, *, limit: int) -> bytes:
    """Decompresses one zstd frame. Raises TooLarge above `limit` bytes, and HTTPException 400 for a broken frame."""
    try:
        size = zstandard.frame_content_size(body)
        if size > limit:
            raise TooLarge(too_many_bytes(f"{size} decompressed", limit))
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise HTTPException(
            400, f"the zstd body is broken, or holds more than max_body_bytes ({limit}): {error}"
        ) from None


# From a body to its receipt


@contextmanager
def counted_if_refused(gateway: Gateway, caller: Caller) -> Iterator[None]:
    """Around reading the body of a training operation: counts the request when the block refuses it.

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
    """`submit_json` of a body that is read."""
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
            # Without the session's number: the SDK takes a new one each time it sends an ephemeral save again, and goes
            # on with the session that the answer names.
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


async def submit(gateway: Gateway, caller: Caller, submission: Submission) -> answers.training.Receipt:
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
    except TooFarAhead as error:
        return receipt(refused_id(caller, error), model_id)
    finally:
        if submission.hold is not None and gateway.futures.pending(request_id) is not submission:
            submission.hold.release()
    return receipt(request_id, model_id)


_batch_post = partial(POST, errors=SUBMISSION, also_takes={PROTOBUF: BINARY})
routes = [
    _batch_post("/forward_backward", forward_backward, takes=openapi_bodies.ForwardBackward),
    _batch_post("/forward", forward, takes=openapi_bodies.Forward),
    POST("/optim_step", optim_step, errors=SUBMISSION, takes=schemas.OptimStep),
]
