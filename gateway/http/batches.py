"""Reads the body of a batch, protobuf or JSON, compressed or not, and makes a `Submission` of it."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

import zstandard
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from starlette.exceptions import HTTPException

from gateway import convert, json_forms, schemas
from gateway.assets import pointers_of_batch
from gateway.codec import (
    IDS_BYTES,
    Request,
    TooLarge,
    check_values,
    json_object,
    off_loop,
    parse_ids,
    protobuf_values,
    read,
    too_many_bytes,
)
from gateway.config import GatewayConfig
from gateway.futures import JSON, PROTOBUF
from gateway.ids import batch_fingerprint, fingerprint
from gateway.load import Share
from gateway.training.submission import Submission
from tinsmith.errors import InvalidRequest, OutOfCapacity, ServiceError
from tinsmith.rpc.parts import check_parts
from tinsmith.v1 import trainer_pb2

_MAX_WINDOW_BYTES = 2**23
"""Largest window of a zstd frame that is read piece by piece; RFC 8878 asks decoders for this much."""


async def read_batch(
    request: Request, config: GatewayConfig, turn: AsyncExitStack, *, forward_only: bool
) -> Submission:
    """Reads a batch in protobuf or JSON, by its content type. `turn`: gets the turn of a large body, which is not over
    at the return. `forward_only`: the endpoint is `forward`.

    A body without seq_id gets seq_id 0. A body that is too large, or whose JSON holds no batch, uses up its seq_id. So
    it becomes a refused submission with its ids. Raises TooLarge when the ids cannot be read, OutOfCapacity, and
    HTTPException 400 for another content type or encoding, a broken body, or a JSON body without ids.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (PROTOBUF, JSON):
        raise HTTPException(400, f"content-type {content_type!r} is not supported; send {PROTOBUF} or {JSON}")
    is_json = content_type == JSON
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "zstd"):
        raise HTTPException(400, f"content-encoding {encoding!r} is not supported; use zstd or none")
    is_compressed = encoding == "zstd"
    try:
        body = await read(request)
    except TooLarge as error:
        return _too_large(error, is_json=is_json, is_compressed=is_compressed, forward_only=forward_only)

    def decode() -> Submission | _JsonBatch:
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
        cast(Share, request.state.body_share).take(min(num_bytes, config.max_body_bytes))
    await turn.enter_async_context(request.turn(num_bytes))
    batch = await off_loop(decode, num_bytes=num_bytes, config=config)
    if isinstance(batch, Submission):
        return batch
    try:
        await request.gateway.assets.fill(batch.pointers, cast(Share, request.state.body_share))
    except OutOfCapacity:
        raise
    except ServiceError as error:
        return batch.refused(error)
    return await off_loop(batch.submission, num_bytes=num_bytes, config=config)


def _from_protobuf(body: bytes, config: GatewayConfig, *, forward_only: bool) -> Submission:
    """The submission of a batch in protobuf. Its body is the client's, with `forward_only` appended if need be."""
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
    """The submission of a batch that the gateway refuses. `parts`: content by which a repeat is told from another
    request."""
    # The kind is `forward` for a batch without gradients, because its refusal loses none.
    submission = Submission.of("forward" if forward_only else "forward_backward", model_id, seq_id)
    submission.fingerprint = fingerprint(*parts)
    submission.refuse(error)
    return submission


def _unknown_field(message: trainer_pb2.ForwardBackwardRequest, body: bytes) -> InvalidRequest | None:
    """The error for a message with an unknown field at any depth; None without one. Removes unknown fields."""
    is_outside = len(UnknownFieldSet(message)) > 0
    # The parts are measured one by one, because protobuf holds the interpreter's lock while it measures a message.
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
class _JsonBatch:
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


def _from_json(body: bytes, config: GatewayConfig, *, forward_only: bool) -> Submission | _JsonBatch:
    """The submission of a batch in JSON; the batch itself if pictures have to be fetched first."""
    content = json_object(body, config)
    ids = parse_ids(schemas.GivenIds, content)
    batch = _JsonBatch(content, ids.model_id, ids.seq_id or 0, body, forward_only)
    return batch if batch.pointers else batch.submission()


def _too_large(error: TooLarge, *, is_json: bool, is_compressed: bool, forward_only: bool) -> Submission:
    """The refused submission of a batch that is too large. Raises `error` when the ids of the batch cannot be read."""
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
