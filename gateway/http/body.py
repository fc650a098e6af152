"""Reads request bodies: bounds, decompresses and parses them; large ones in a thread."""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import zstandard
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gateway import counting, json_forms, schemas
from gateway.codec import invalid, off_loop
from gateway.config import GatewayConfig
from gateway.held import Share
from gateway.ids import batch_fingerprint, fingerprint
from gateway.training.operations import Submission
from tinsmith.errors import InvalidRequest, OutOfCapacity, ServiceError
from tinsmith.v1 import trainer_pb2

_IDS_BYTES = 4096
"""Bytes at either end of a forward_backward in which its ids lie: first in protobuf, last in JSON."""
_MAX_DRAINED_BYTES = 2**30
_MAX_KEY_CHARACTERS = 300
_MAX_WINDOW_BYTES = 2**23
"""Largest window of a zstd frame that is read piece by piece; RFC 8878 asks decoders for this much."""

Schema = TypeVar("Schema", bound=BaseModel)


def _too_many_bytes(size: str, limit: int) -> str:
    return f"the body has {size} bytes; this server's max_body_bytes is {limit}"


class TooLarge(HTTPException):
    """HTTPException 413 for a body. `start` and `end`: its beginning and its end, at most `_IDS_BYTES` each."""

    def __init__(self, detail: str, *, start: bytes = b"", end: bytes = b"") -> None:
        super().__init__(413, detail)
        self.start = start
        self.end = end


async def read(request: Request, config: GatewayConfig) -> bytes:
    """The body as it was sent.

    Raises TooLarge above max_body_bytes, and OutOfCapacity when max_held_body_bytes leaves no room for it. The rest of
    a refused body is still read, up to a bound, because a client that is sending would miss the answer.
    """
    limit = config.max_body_bytes
    held = cast(Share, request.state.held)
    chunks: list[bytes] = []
    num_bytes, start, end = 0, b"", b""
    full: OutOfCapacity | None = None
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if full is not None:
            if num_bytes > limit:
                break
        elif num_bytes <= limit:
            try:
                held.take(len(chunk))
                chunks.append(chunk)
            except OutOfCapacity as error:
                full = error
                chunks.clear()
        elif num_bytes > _MAX_DRAINED_BYTES:
            end = b""
            break
        else:
            if not start:
                start = b"".join([*chunks, chunk])[:_IDS_BYTES]
                chunks.clear()
            end = (end + chunk)[-_IDS_BYTES:]
    if full is not None:
        raise full
    if num_bytes > limit:
        declared = request.headers.get("content-length", "")
        raise TooLarge(_too_many_bytes(declared or f"more than {limit}", limit), start=start, end=end)
    return b"".join(chunks)


def idempotency_key(request: Request) -> str | None:
    """The client's key for this request and its repeats; None when it sent none.

    Raises InvalidRequest for a key that is too long for the database's index.
    """
    key = request.headers.get("x-idempotency-key")
    if key is not None and len(key) > _MAX_KEY_CHARACTERS:
        raise InvalidRequest(
            f"x-idempotency-key: has {len(key)} characters, and may have at most {_MAX_KEY_CHARACTERS}",
            field="x-idempotency-key",
        )
    return key


async def read_json(request: Request, config: GatewayConfig) -> tuple[dict[str, Any], bytes]:
    """The JSON object in the body, and the body itself. Integers of any size stay exact.

    Raises what `read` raises, HTTPException 400 when the body is no JSON object, and TooLarge when it holds more than
    max_body_values.
    """
    body = await read(request, config)
    return await off_loop(lambda: _object(body, config), num_bytes=len(body), config=config), body


def _check_values(number: int, body: bytes, config: GatewayConfig) -> None:
    """Raises TooLarge when the body holds more values than max_body_values."""
    if number > config.max_body_values:
        raise TooLarge(
            f"the body holds more values than this server's max_body_values, {config.max_body_values}; a list or an "
            "object counts as 10 of them, and each member of an object as 3 more",
            start=body[:_IDS_BYTES],
            end=body[-_IDS_BYTES:],
        )


def _object(body: bytes, config: GatewayConfig) -> dict[str, Any]:
    _check_values(counting.json_values(body, limit=config.max_body_values), body, config)
    try:
        parsed = from_json(body)
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise HTTPException(400, f"the body must be a JSON object, not {type(parsed).__name__}")
    return parsed


async def read_forward_backward(request: Request, config: GatewayConfig, *, forward_only: bool = False) -> Submission:
    """Reads a batch in protobuf or JSON, by its content type. `forward_only`: the endpoint is `forward`.

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

    def decode() -> Submission:
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
    return await off_loop(decode, num_bytes=num_bytes, config=config)


def _from_protobuf(body: bytes, config: GatewayConfig, *, forward_only: bool) -> Submission:
    """The batch. Its body stays as the client sent it; nothing in it is computed with here."""
    message = trainer_pb2.ForwardBackwardRequest()
    if len(body) > config.max_body_values:  # a smaller body cannot hold that many
        number = counting.protobuf_values(body, cast(Descriptor, message.DESCRIPTOR), limit=config.max_body_values)
        _check_values(number, body, config)
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise HTTPException(400, f"the body is not a ForwardBackwardRequest in protobuf: {error}") from None
    if (unknown := _unknown_field(message)) is not None:
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
    num_tokens = sum(len(chunk.encoded_text.tokens) // 4 for datum in message.data for chunk in datum.model_input)
    return Submission.of(
        "forward_backward",
        message.model_id,
        message.seq_id,
        rpc="ForwardBackward",
        body=body,
        fingerprint=batch_fingerprint(body),
        num_tokens=num_tokens,
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


def _unknown_field(message: trainer_pb2.ForwardBackwardRequest) -> InvalidRequest | None:
    """The error for a message with an unknown field at any depth; None without one. Removes unknown fields."""
    outside = sorted(field.field_number for field in UnknownFieldSet(message))
    # Part by part: protobuf holds the interpreter's lock while it measures a message.
    parts = [*message.data, *message.loss_fn_config_v2.values(), message.custom_loss]
    num_bytes = sum(part.ByteSize() for part in parts)
    message.DiscardUnknownFields()
    if not outside and sum(part.ByteSize() for part in parts) == num_bytes:
        return None
    where = f"field number {outside[0]} of the request" if outside else "a field of data"
    return InvalidRequest(
        f"{where}: this server knows no such field and cannot apply it; leave it out",
        field=str(outside[0]) if outside else "data",
    )


def _from_json(body: bytes, config: GatewayConfig, *, forward_only: bool) -> Submission:
    content = _object(body, config)
    ids = parse_ids(schemas.GivenIds, content)
    seq_id = ids.seq_id or 0
    try:
        message = json_forms.forward_backward(content, model_id=ids.model_id, seq_id=seq_id, forward_only=forward_only)
    except ServiceError as error:
        return _refused(ids.model_id, seq_id, error, "invalid", body, forward_only=forward_only)
    return _batch(message, message.SerializeToString(deterministic=True))


def _too_large(error: TooLarge, *, is_json: bool, is_compressed: bool, forward_only: bool) -> Submission:
    start = error.start
    if is_compressed:
        try:
            decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
            start = decompressor.stream_reader(start).read(_IDS_BYTES)
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
            raise TooLarge(_too_many_bytes(f"{size} decompressed", limit))
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise HTTPException(
            400, f"the zstd body is broken, or holds more than max_body_bytes ({limit}): {error}"
        ) from None


def parse(schema: type[Schema], content: dict[str, Any]) -> Schema:
    """Validates a body. Raises InvalidRequest, naming field and value; also for an unknown field that is set."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise invalid(error, content) from None


def parse_ids(schema: type[Schema], content: dict[str, Any]) -> Schema:
    """Validates only the schema's fields of a body, whose other fields have another schema. Raises InvalidRequest."""
    return parse(schema, {name: content[name] for name in schema.model_fields if name in content})
