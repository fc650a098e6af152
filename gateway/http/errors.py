"""Errors as HTTP answers: a status and {"detail": ...}.

409 is never used, because the SDK would repeat the request for five minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.database.outages import TRY_AGAIN
from gateway.shown import shown, shown_name
from tinsmith.rpc import logs
from tinsmith.rpc.errors import (
    AlreadyExists,
    BudgetExceeded,
    InvalidRequest,
    NotFound,
    NotReady,
    OutOfCapacity,
    ServiceError,
)

logger = logging.getLogger(__name__)

_LONGEST = 200
"""Most characters of a message that may repeat what a client sent."""


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


def invalid(error: ValidationError) -> InvalidRequest:
    """The error for the first wrong field: it names the field, its value, and what would be right."""
    first = error.errors(include_url=False)[0]
    field = name_of(first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidRequest(
            f"{field}: this server knows no such field and cannot apply {shown(first['input'])}; leave it out",
            field=field,
        )
    value = "" if first["type"] == "missing" else f", not {shown(first['input'])}"
    if first["type"] == "float_type" and first["input"] is None:
        value = ", not null, which is what JSON makes of nan and inf"
    return InvalidRequest(f"{field}: {first['msg'][:_LONGEST]}{value}", field=field)


def name_of(place: Iterable[str | int]) -> str:
    """The path of a field in a body, such as "messages[0].role". Long keys are cut."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shown_name(part)}" for part in place)
    return "".join(parts).removeprefix(".")
