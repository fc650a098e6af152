"""HTTP requests and answers, for all routes.

Bodies are bounded, counted and parsed here. Errors are a status and {"detail": ...}; results have the form that the
client's headers ask for. The headers also tell the version of the client. Large bodies are parsed and made on a thread.

409 is never used, because the SDK would repeat the request for five minutes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import orjson
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette import requests
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.config import GatewayConfig
from gateway.futures import JSON, PROTOBUF, Answer
from gateway.load import Share
from gateway.shown import shown, shown_name
from gateway.tenants.access import Caller
from tinsmith.cores import Cores
from tinsmith.errors import (
    AlreadyExists,
    BudgetExceeded,
    InvalidRequest,
    NotFound,
    NotReady,
    OutOfCapacity,
    ServiceError,
)
from tinsmith.rpc.parts import varint
from tinsmith.threads import in_pool_of

if TYPE_CHECKING:
    from gateway.gateway import Gateway

_LONGEST = 200
"""Most characters of a message that may repeat what a client sent."""
_KNOWS_EXTERNAL = (0, 30)
"""First SDK version that knows checkpoints of type external. An older one refuses a list that holds one."""
_SENDS_PARTS_AT_ONCE = (0, 28)
"""First SDK version that sends all parts of a large batch before it waits for an answer. An older one may hear that the
first part failed, and still send the second part and the optim_step."""
_KEEPS_CANCELS = (3, 12)
"""First Python whose `asyncio.wait_for` keeps a cancellation that arrives together with the answer
(python/cpython#86296)."""

IDS_BYTES = 4096
"""Bytes at either end of a forward_backward in which its ids lie: first in protobuf, last in JSON."""
MAX_DRAINED_BYTES = 2**30
"""Most bytes of a body that are still read although it is refused."""
_MAX_KEY_CHARACTERS = 300
"""Longest X-Idempotency-Key, in characters."""

_PARSER = ThreadPoolExecutor(1, "bodies")
"""One thread, which parses one body at a time. A parser holds the interpreter's lock, so with several threads the event
loop would wait for several parsers in turn."""

T = TypeVar("T")
Schema = TypeVar("Schema", bound=BaseModel)


def json_response(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status_code=status, headers=headers, media_type=JSON)


def no_such_path(request: requests.Request) -> str:
    """The text of a 404. It says how to correct the base URL: that of the SDK has no path, and that of OpenAI's clients
    ends with /v1."""
    path = request.url.path
    prefix, api, _ = path.partition("/api/v1/")
    if prefix and api:
        advice = f"; leave {prefix} out of the base URL"
    elif path in ("/chat/completions", "/completions", "/models", "/responses"):
        advice = "; add /v1 to the base URL"
    else:
        advice = ""
    return f"this server has no {request.method} {path}{advice}"


def detail(status: int, text: str, *, headers: dict[str, str] | None = None) -> Response:
    """The response for an error, {"detail": text}."""
    return json_response({"detail": text}, status=status, headers=headers)


def status_of(error: ServiceError) -> int:
    """The HTTP status for an error."""
    match error:
        case NotFound():
            return 404
        case AlreadyExists():
            return 422
        case BudgetExceeded():
            return 403  # 402 would make the SDK repeat the request for an hour
        case OutOfCapacity():
            return 429
        case NotReady():
            return 503
    return 400 if error.category == "user" else 500


def retry_after(error: ServiceError) -> dict[str, str] | None:
    """The header Retry-After for an error after which the client should try again; None for other errors."""
    if status_of(error) not in (429, 503):
        return None
    return {"Retry-After": error.metadata.get("retry_after_s", "1")}


async def service_error(request: requests.Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    status = status_of(error)
    return detail(status, error.message, headers=retry_after(error))


def invalid(error: ValidationError, body: Any) -> InvalidRequest:
    """The error for the first wrong field of a body. It names the field, its value, and what would be right."""
    first = error.errors(include_url=False)[0]
    field = field_of(first, body)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(
            f"{field}: this server knows no such field and cannot apply {shown(first['input'])}; leave it out",
            field=field,
        )
    value = "" if first["type"] == "missing" else f", not {shown(first['input'])}"
    if first["type"] == "float_type" and first["input"] is None:
        value = ", not null, which is what JSON makes of nan and inf"
    return InvalidRequest(f"{field}: {message_of(first)[:_LONGEST]}{value}", field=field)


def message_of(error: ErrorDetails) -> str:
    """The message of an error, without the words that pydantic puts before that of a ValueError."""
    return error["msg"].removeprefix("Value error, ")


def field_of(error: ErrorDetails, body: Any) -> str:
    """The path in a body of the field that an error is about.

    For a union, pydantic puts the name of the branch into its path, such as `str` behind `stop`, or the name of a
    class. These names are left out, because a client knows only those in the body.
    """
    place: list[str | int] = []
    value: Any = body
    for part in error["loc"]:
        if (isinstance(part, int) and isinstance(value, list)) or (isinstance(value, dict) and part in value):
            place.append(part)
            value = cast(Any, value)[part]
    # A field that is null counts as missing, too. The loop above has found it in the body.
    if error["type"] == "missing" and error["loc"][-1] not in place[-1:]:
        place.append(error["loc"][-1])
    return name_of(place)


def name_of(place: Iterable[str | int]) -> str:
    """The path of a field in a body, such as "messages[0].role". Long keys are cut."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shown_name(part)}" for part in place)
    return "".join(parts).removeprefix(".")


# Reading a body


def too_many_bytes(size: str, limit: int) -> str:
    return f"the body has {size} bytes; this server's max_body_bytes is {limit}"


class TooLarge(HTTPException):
    """HTTPException 413 for a body. `start` and `end`: the body's beginning and end, at most `IDS_BYTES` each."""

    def __init__(self, detail: str, *, start: bytes = b"", end: bytes = b"") -> None:
        super().__init__(413, detail)
        self.start = start
        self.end = end


async def read(request: Request) -> bytes:
    """The body as it was sent. A large body takes a slot of its owner (`Receiving`) while it comes in.

    Raises TooLarge above max_body_bytes, and OutOfCapacity when max_held_body_bytes leaves no room for it. The rest of
    a refused body is still read, up to a bound, because a client that is sending would miss the answer.
    """
    config, receiving = request.gateway.config, request.gateway.receiving
    limit = config.max_body_bytes
    share = cast(Share, request.state.body_share)
    chunks: list[bytes] = []
    num_bytes, start, end = 0, b"", b""
    full: OutOfCapacity | None = None
    async with AsyncExitStack() as slot:
        async for chunk in request.stream():
            becomes_large = num_bytes <= config.thread_body_bytes < num_bytes + len(chunk)
            num_bytes += len(chunk)
            if full is not None:
                if num_bytes > limit:
                    break
            elif num_bytes <= limit:
                try:
                    share.take(len(chunk))
                    chunks.append(chunk)
                except OutOfCapacity as error:
                    full = error
                    chunks.clear()
            elif num_bytes > MAX_DRAINED_BYTES:
                end = b""
                break
            else:
                if not start:
                    start = b"".join([*chunks, chunk])[:IDS_BYTES]
                    chunks.clear()
                end = (end + chunk)[-IDS_BYTES:]
            if becomes_large:
                await slot.enter_async_context(receiving.slot(request.owner))
    if full is not None:
        raise full
    if num_bytes > limit:
        declared = request.headers.get("content-length", "")
        raise TooLarge(too_many_bytes(declared or f"more than {limit}", limit), start=start, end=end)
    return b"".join(chunks)


class Request(requests.Request):
    """A request, with the gateway that it came to and the caller who sent it."""

    raw: bytes
    """The body as it was sent. `json_object` sets it."""

    @property
    def gateway(self) -> Gateway:
        return cast("Gateway", self.app.state.gateway)

    @property
    def caller(self) -> Caller:
        """The holder of the request's key."""
        return cast(Caller, self.state.caller)

    @property
    def owner(self) -> str:
        """The owner of everything that the request makes."""
        return self.caller.owner

    @property
    def idempotency_key(self) -> str | None:
        """The client's key for this request and its repeats; None when it sent none.

        Raises InvalidRequest for a key that is too long for the database's index.
        """
        key = self.headers.get("x-idempotency-key")
        if key is not None and len(key) > _MAX_KEY_CHARACTERS:
            raise InvalidRequest(
                f"x-idempotency-key: has {len(key)} characters, and may have at most {_MAX_KEY_CHARACTERS}",
                field="x-idempotency-key",
            )
        return key

    async def json_object(self) -> dict[str, Any]:
        """The JSON object in the body. Integers of any size stay exact. Sets `raw`.

        Raises the errors of `read`, HTTPException 400 when the body is no JSON object, and TooLarge when it holds more
        than max_body_values.
        """
        config = self.gateway.config
        self.raw = body = await read(self)
        async with self.turn(len(body)):
            return await off_loop(lambda: json_object(body, config), num_bytes=len(body), config=config)

    async def work(self, work: Callable[[], T]) -> T:
        """The result of `work` on the content of the body. On a large body, `work` waits for a turn of the caller, and
        runs in a thread."""
        num_bytes = len(self.raw)
        async with self.turn(num_bytes):
            return await off_loop(work, num_bytes=num_bytes, config=self.gateway.config)

    def turn(self, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """A context for work on a body of this size. It waits for a turn of the caller if the body is large."""
        gateway = self.gateway
        return nullcontext() if num_bytes <= gateway.config.thread_body_bytes else gateway.turns.turn(self.owner)


def check_values(number: int, body: bytes, config: GatewayConfig) -> None:
    """Raises TooLarge when the body holds more values than max_body_values."""
    if number > config.max_body_values:
        raise TooLarge(
            f"the body holds more values than this server's max_body_values, {config.max_body_values}; a list or an "
            "object counts as 10 of them, and each member of an object as 3 more",
            start=body[:IDS_BYTES],
            end=body[-IDS_BYTES:],
        )


def json_object(body: bytes, config: GatewayConfig) -> dict[str, Any]:
    check_values(json_values(body, limit=config.max_body_values), body, config)
    try:
        parsed = from_json(body)
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise HTTPException(400, f"the body must be a JSON object, not {type(parsed).__name__}")
    return parsed


def parse(schema: type[Schema], content: dict[str, Any]) -> Schema:
    """Validates a body. Raises InvalidRequest, which names field and value, for a wrong field, and for an unknown field
    that is set."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise invalid(error, content) from None


def parse_ids(schema: type[Schema], content: dict[str, Any]) -> Schema:
    """Validates only the schema's fields of a body, whose other fields have another schema. Raises InvalidRequest."""
    return parse(schema, {name: content[name] for name in schema.model_fields if name in content})


# Counting the values of a body
#
# A parser holds the interpreter's lock until it is done, so the event loop waits, whichever thread parses. The parsed
# objects may also take a hundred times the memory of the body. Counting is cheap, and other threads can run meanwhile.
# So a body is counted first, and one with too many values is not parsed.

_CONTAINER_COST = 10
"""Count of a list or an object; a number counts 1."""
_MEMBER_COST = 3
"""Count of a member of an object, besides that of the member's value."""
_PIECE_BYTES = 2**16
"""Bytes of a body that are counted in one go. The event loop can run between two pieces."""
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5


def json_values(body: bytes, *, limit: int) -> int:
    """An upper bound of the values in a JSON text, by its punctuation. Stops counting above `limit`.

    A list or an object counts as 10, and a member of an object as 3 more than its value.
    """
    if (at_most := 1 + _punctuation(body)) <= limit:
        return at_most
    # The quick count includes punctuation inside texts, which may make it too high. So count again without texts.
    count, is_text, rest = 1, False, b""
    for start in range(0, len(body), _PIECE_BYTES):
        piece = rest + body[start : start + _PIECE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        rest = piece[len(piece) - num_backslashes % 2 :]  # a backslash that escapes the next byte
        piece = piece[: len(piece) - len(rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        count += _punctuation(b"".join(parts[is_text::2]))
        is_text ^= len(parts) % 2 == 0
        if count > limit:
            break
    return count


def _punctuation(text: bytes) -> int:
    num_containers = text.count(b"[") + text.count(b"{")
    return text.count(b",") + _MEMBER_COST * text.count(b":") + _CONTAINER_COST * num_containers


@functools.cache
def _inside(kind: Descriptor) -> dict[int, Descriptor | None]:
    """Number of a field -> type of its message; None for a field of numbers, which may be packed. Fields of text or
    bytes are left out."""
    texts = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)
    return {field.number: field.message_type for field in kind.fields if field.type not in texts}


def protobuf_values(body: bytes, kind: Descriptor, *, limit: int) -> int:
    """Number of fields of a message and of all messages in it, plus the bytes of packed numbers. Stops counting above
    `limit`.

    In a broken message, only the fields before the break are counted.
    """
    count = 0
    messages = [(kind, 0, len(body))]
    try:
        while messages and count <= limit:
            kind, at, end = messages.pop()
            inside = _inside(kind)
            while at < end and count <= limit:
                count += 1
                tag, at = varint(body, at) if body[at] >= 0x80 else (body[at], at + 1)
                wire = tag & 7
                if wire == _SIZED:
                    size, at = varint(body, at) if body[at] >= 0x80 else (body[at], at + 1)
                    if (number := tag >> 3) in inside:
                        if (found := inside[number]) is None:
                            count += size
                        else:
                            messages.append((found, at, min(at + size, end)))
                    at += size
                elif wire == _VARINT:
                    _, at = varint(body, at)
                else:
                    at += 8 if wire == _FIXED64 else 4 if wire == _FIXED32 else 0
    except IndexError:
        pass  # the message is broken, which the parser will report
    return count


# Large bodies


async def off_loop(work: Callable[[], T], *, num_bytes: int, config: GatewayConfig) -> T:
    """The result of `work` on `num_bytes` bytes. Above thread_body_bytes, `work` runs in a thread, so that other
    requests go on."""
    if num_bytes <= config.thread_body_bytes:
        return work()
    return await in_pool_of(_PARSER, _announced, work, config.cores_page)


def _announced(work: Callable[[], T], cores_page: str) -> T:
    with cores(cores_page).reading():
        return work()


@functools.cache
def cores(page: str) -> Cores:
    """This gateway's place on the page of cores. Raises ValueError for a malformed page."""
    return Cores(page, most=1, set_threads=lambda _: None)


# The client's headers


async def negotiate(request: requests.Request, answer: Answer, config: GatewayConfig) -> Response:
    """The answer in protobuf if the header Accept names protobuf, else in JSON. SDKs before 0.18.1 read only JSON."""
    if (to_json := answer.as_json) is None:
        return Response(answer.body, media_type=JSON)
    weights = _weights(request.headers.get("accept", ""))
    protobuf = weights.get(PROTOBUF, 0.0)
    if protobuf > 0 and protobuf >= weights.get(JSON, 0.0):
        return Response(answer.body, media_type=PROTOBUF)
    body = await off_loop(lambda: to_json(answer.body), num_bytes=len(answer.body), config=config)
    return Response(body, media_type=JSON)


def _weights(accept: str) -> dict[str, float]:
    """Media type -> weight, of an Accept header (RFC 9110, 12.5.1). Weight 0 means not acceptable."""
    weights = {}
    for item in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in item.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            weights[media_type] = float(quality)
        except ValueError:
            weights[media_type] = 1.0
    return weights


def knows_external_checkpoints(request: Request) -> bool:
    """Whether the client can read lists with checkpoints of type external. Clients other than the SDK can."""
    return _is_since(_KNOWS_EXTERNAL, request, "x-stainless-package-version")


def sends_parts_at_once(request: Request) -> bool:
    """Whether the client sends all parts of a batch before it asks for an answer. Clients other than the SDK must do
    so."""
    return _is_since(_SENDS_PARTS_AT_ONCE, request, "x-stainless-package-version")


def can_use_pyqwest(request: Request) -> bool:
    """Whether the SDK may use the pyqwest transport of its HTTP client, which awaits answers in `asyncio.wait_for`.

    In an older Python a heartbeat could lose its cancellation there, and `ServiceClient.close()` would wait for ever.
    """
    return _is_since(_KEEPS_CANCELS, request, "x-stainless-runtime-version")


def _is_since(version: tuple[int, int], request: Request, header: str) -> bool:
    """Whether the header has this version or a newer one, or none at all."""
    found = re.match(r"(\d+)\.(\d+)", request.headers.get(header, ""))
    return found is None or (int(found[1]), int(found[2])) >= version
