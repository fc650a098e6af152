"""Request bodies: bounded, decompressed, parsed off the event loop when they are large."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zstandard
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gateway.config import GatewayConfig
from gateway.errors import invalid
from tinsmith.rpc.errors import InvalidRequest
from tinsmith.v1 import trainer_pb2

_START_BYTES = 4096
"""Enough of a forward_backward to hold its ids, which are its first fields."""
_MAX_DRAINED_BYTES = 2**30

T = TypeVar("T")
Schema = TypeVar("Schema", bound=BaseModel)


class TooLarge(HTTPException):
    """413. `start` is the beginning of the body, as it was sent."""

    def __init__(self, size: str, limit: int, *, start: bytes = b"") -> None:
        super().__init__(413, f"the body has {size} bytes; this server's max_body_bytes is {limit}")
        self.start = start


async def read(request: Request, config: GatewayConfig) -> bytes:
    """The body as it was sent. Raises TooLarge above max_body_bytes; what is more is read and thrown away."""
    limit = config.max_body_bytes
    chunks: list[bytes] = []
    num_bytes, start = 0, b""
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= limit:
            chunks.append(chunk)
        elif num_bytes > _MAX_DRAINED_BYTES:
            break
        elif not start:
            start = b"".join([*chunks, chunk])[:_START_BYTES]
            chunks.clear()
    if num_bytes > limit:
        declared = request.headers.get("content-length", "")
        raise TooLarge(declared or f"more than {limit}", limit, start=start)
    return b"".join(chunks)


def fingerprint(*parts: bytes | str | None) -> str:
    """Hash of a request, to tell a repeat from a conflict."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part or b""
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


async def off_loop(work: Callable[[], T], *, num_bytes: int, config: GatewayConfig) -> T:
    """Does the work that so many bytes cause, in a thread when they are many."""
    return await asyncio.to_thread(work) if num_bytes > config.thread_body_bytes else work()


async def read_json(request: Request, config: GatewayConfig) -> tuple[dict[str, Any], bytes]:
    """The JSON object of the body, and the body. Integers of any size stay exact. 400 when it is not one."""
    body = await read(request, config)
    try:
        parsed = await off_loop(lambda: from_json(body), num_bytes=len(body), config=config)
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise HTTPException(400, f"the body must be a JSON object, not {type(parsed).__name__}")
    return parsed, body


@dataclass(frozen=True, slots=True)
class Batch:
    """A ForwardBackwardRequest that is passed on unread but for this."""

    model_id: str
    seq_id: int
    num_tokens: int
    body: bytes
    """Its canonical bytes."""
    fingerprint: str
    error: InvalidRequest | None = None
    """Why it is refused; then there is no body."""


async def read_forward_backward(request: Request, config: GatewayConfig) -> Batch:
    """The protobuf of the body. 400 when it is not one.

    One that is too large has used up its seq_id all the same, so it is refused with its ids; 413 when it has none.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.startswith("application/x-protobuf"):
        raise HTTPException(400, f"content-type {content_type!r} is not supported; send application/x-protobuf")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "zstd"):
        raise HTTPException(400, f"content-encoding {encoding!r} is not supported; use zstd or none")
    try:
        body = await read(request, config)
    except TooLarge as error:
        return _refused(error, compressed=encoding == "zstd")

    def decode(body: bytes) -> Batch:
        if encoding == "zstd":
            body = decompress(body, limit=config.max_body_bytes)
        message = trainer_pb2.ForwardBackwardRequest()
        try:
            message.ParseFromString(body)
        except DecodeError as error:
            raise HTTPException(400, f"the body is not a ForwardBackwardRequest in protobuf: {error}") from None
        canonical = message.SerializeToString(deterministic=True)
        return Batch(
            model_id=message.model_id,
            seq_id=message.seq_id,
            num_tokens=sum(len(c.encoded_text.tokens) // 4 for datum in message.data for c in datum.model_input),
            body=canonical,
            fingerprint=fingerprint("forward_backward", canonical),
        )

    try:
        return await off_loop(lambda: decode(body), num_bytes=len(body), config=config)
    except TooLarge as error:
        error.start = body
        return _refused(error, compressed=True)


def _refused(error: TooLarge, *, compressed: bool) -> Batch:
    start = error.start
    if compressed:
        try:
            start = zstandard.ZstdDecompressor().stream_reader(start).read(_START_BYTES)
        except zstandard.ZstdError:
            raise error from None
    ids = _leading_ids(start)
    if ids is None:
        raise error
    model_id, seq_id = ids
    return Batch(
        model_id,
        seq_id,
        num_tokens=0,
        body=b"",
        fingerprint=fingerprint("too large", start, error.detail),
        error=InvalidRequest(f"data: {error.detail}; send fewer or shorter datums", field="data"),
    )


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


def decompress(body: bytes, *, limit: int) -> bytes:
    """One zstd frame. 413 when it holds more than `limit` bytes, 400 when it is broken."""
    try:
        size = zstandard.frame_content_size(body)
        if size > limit:
            raise TooLarge(f"{size} decompressed", limit)
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise HTTPException(
            400, f"the zstd body is broken, or holds more than max_body_bytes ({limit}): {error}"
        ) from None


def parse(schema: type[Schema], content: dict[str, Any]) -> Schema:
    """Raises InvalidRequest, naming the field and the value."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise invalid(error) from None
