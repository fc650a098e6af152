"""HTTP answers and requests, for all routes.

Errors are a status and {"detail": ...}; results have the form that the client's headers ask for. The headers also tell
the version of the client. Large bodies are parsed and made on a thread.

409 is never used, because the SDK would repeat the request for five minutes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.config import GatewayConfig
from gateway.database.outages import TRY_AGAIN
from gateway.futures import JSON, PROTOBUF, Answer
from gateway.shown import shown, shown_name
from gateway.tenants.caller import Caller
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
from tinsmith.rpc import logs

if TYPE_CHECKING:
    from gateway.gateway import Gateway

logger = logging.getLogger(__name__)

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

_PARSER = ThreadPoolExecutor(1, "bodies")
"""One thread, which parses one body at a time. A parser holds the interpreter's lock, so with several threads the event
loop would wait for several parsers in turn."""

T = TypeVar("T")


def json_response(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status_code=status, headers=headers, media_type="application/json")


def detail(status: int, text: str, *, headers: dict[str, str] | None = None) -> Response:
    return json_response({"detail": text}, status=status, headers=headers)


def status_of(error: ServiceError) -> int:
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


async def service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    status = status_of(error)
    return detail(status, error.message, headers=retry_after(error))


async def database_unusable(request: Request, error: Exception) -> Response:
    logger.error("%s %s: the database cannot be used: %s", request.method, request.url.path, error)
    return await service_error(request, NotReady(TRY_AGAIN))


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code == 404 and text == "Not Found":
        text = f"this server has no {request.method} {request.url.path}"
    elif error.status_code == 405:
        text = f"{request.url.path} does not answer {request.method}"
    return detail(error.status_code, text, headers=dict(error.headers or {}))


async def gone(request: Request, error: Exception) -> Response:
    """The answer to a client that left in the middle of its body; it appears in metrics only."""
    return detail(400, "the body ended before it was complete")


async def internal_error(request: Request, error: Exception) -> Response:
    # This answer bypasses the middleware that adds the request id to all others.
    headers = {logs.REQUEST_ID_METADATA: logs.request_id.get()}
    return detail(500, "internal error of the gateway; its log has the cause", headers=headers)


def invalid(error: ValidationError, body: Any) -> InvalidRequest:
    """The error for the first wrong field of a body: it names the field, its value, and what would be right."""
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
    return InvalidRequest(f"{field}: {first['msg'][:_LONGEST]}{value}", field=field)


def field_of(error: ErrorDetails, body: Any) -> str:
    """The path in a body of the field that an error is about.

    pydantic puts names of its own into a place, of the branches of a union: such as `str` behind `stop`, and a class. A
    client knows only what is in the body.
    """
    place: list[str | int] = []
    value: Any = body
    for part in error["loc"]:
        if (isinstance(part, int) and isinstance(value, list)) or (isinstance(value, dict) and part in value):
            place.append(part)
            value = cast(Any, value)[part]
    if error["type"] == "missing" and error["loc"][-1] not in place[-1:]:  # null is missing, too, but in the body
        place.append(error["loc"][-1])
    return name_of(place)


def name_of(place: Iterable[str | int]) -> str:
    """The path of a field in a body, such as "messages[0].role". Long keys are cut."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shown_name(part)}" for part in place)
    return "".join(parts).removeprefix(".")


# Large bodies


async def off_loop(work: Callable[[], T], *, num_bytes: int, config: GatewayConfig) -> T:
    """Does work on a number of bytes; in a thread when they are many, so that other requests go on."""
    if num_bytes <= config.thread_body_bytes:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_PARSER, _announced, work, config.cores_page)


def _announced(work: Callable[[], T], cores_page: str) -> T:
    with cores(cores_page).reading():
        return work()


@functools.cache
def cores(page: str) -> Cores:
    """This gateway's place on the page of cores. Raises ValueError for a malformed page."""
    return Cores(page, most=1, set_threads=lambda _: None)


# The parts and the caller


def gateway_of(request: Request) -> Gateway:
    return cast("Gateway", request.app.state.gateway)


def caller_of(request: Request) -> Caller:
    """The holder of the request's key."""
    return cast(Caller, request.state.caller)


def owner_of(request: Request) -> str:
    """The owner of everything that the request makes."""
    return caller_of(request).owner


# The client's headers


async def negotiate(request: Request, answer: Answer, config: GatewayConfig) -> Response:
    """The answer in protobuf if the header Accept names that, else in JSON: SDKs before 0.18.1 read only JSON."""
    to_json = answer.as_json
    weights = _weights(request.headers.get("accept", ""))
    protobuf = weights.get(PROTOBUF, 0.0)
    if to_json is None or (protobuf > 0 and protobuf >= weights.get(JSON, 0.0)):
        return Response(answer.body, media_type=answer.media_type)
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
    """Whether the client can read lists with checkpoints of type external. Other clients than the SDK can."""
    version = _version(request, "x-stainless-package-version")
    return version is None or version >= _KNOWS_EXTERNAL


def sends_parts_at_once(request: Request) -> bool:
    """Whether the client sends all parts of a batch before it asks for an answer. Other clients than the SDK have
    to."""
    version = _version(request, "x-stainless-package-version")
    return version is None or version >= _SENDS_PARTS_AT_ONCE


def can_use_pyqwest(request: Request) -> bool:
    """Whether the SDK may use the pyqwest transport of its HTTP client, which awaits answers in `asyncio.wait_for`.

    In an older Python a heartbeat could lose its cancellation there, and `ServiceClient.close()` would wait for ever.
    """
    version = _version(request, "x-stainless-runtime-version")
    return version is None or version >= _KEEPS_CANCELS


def _version(request: Request, header: str) -> tuple[int, int] | None:
    """Major and minor version in a header; None when it is absent or holds no version."""
    found = re.match(r"(\d+)\.(\d+)", request.headers.get(header, ""))
    return (int(found[1]), int(found[2])) if found else None
