"""Errors in the form of the OpenAI API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.codec import field_of, json_response, message_of, retry_after, status_of
from gateway.openai.schemas import UNSUPPORTED
from gateway.shown import shown
from tinsmith.errors import InvalidRequest, ServiceError, Unsupported

_TYPES = {401: "invalid_request_error", 429: "rate_limit_error"}

_PARAMS = {
    "num_samples": "n",
    "sampling_params.stop.strings": "stop",
    "sampling_params.stop.token_ids": "stop_token_ids",
    "text": "prompt",
    "template_kwargs": "chat_template_kwargs",
    "topk_sample_logprobs": "top_logprobs",
    "topk_prompt_logprobs": "logprobs",
}
"""Name of a field in our protobuf -> its name in the OpenAI API."""


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: ServiceError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error. An unsupported value is the caller's mistake: 400."""
    status = 400 if isinstance(error, Unsupported) else status_of(error)
    field = error.metadata.get("field")
    param = None if field is None else _PARAMS.get(field, field.removeprefix("sampling_params."))
    message = error.message
    if field and param and message.startswith(f"{field}:"):
        message = param + message.removeprefix(field)
    code = "model_not_found" if status == 404 else error.reason.lower()
    return status, error_body(status, message, param=param, code=code)


def service_error(error: ServiceError) -> Response:
    status, body = body_of(error)
    return json_response(body, status=status, headers=retry_after(error))


def http_error(error: HTTPException) -> Response:
    headers = dict(error.headers or {})
    return json_response(error_body(error.status_code, error.detail), status=error.status_code, headers=headers)


def invalid(error: ValidationError, body: Any) -> ServiceError:
    """The error for a wrong field of a body: it names the field, its value, and what would be right."""
    # A union gives an error for each branch. The branch that fits best has the deepest location.
    found = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    field = field_of(found, body) or None
    message, value = message_of(found), shown(found["input"])
    if found["type"] == "extra_forbidden":
        message = f"{field}: is not supported by this server, which cannot apply {value}; leave it out"
        return Unsupported(message, field=field)
    if field is None:  # a rule about several fields, which the message names
        field = found["type"]
    elif found["type"] == "missing":
        message = f"{field}: {message}"
    else:
        message = f"{field}: {message}, not {value}"
    return (Unsupported if found["type"] == UNSUPPORTED else InvalidRequest)(message, field=field)
