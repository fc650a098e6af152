"""The OpenAI API: models, completions, chat completions, responses."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from gateway.codec import caller_of, gateway_of, json_response, off_loop, owner_of, read_json, turn_of
from gateway.openai import errors, schemas, sources
from gateway.openai.chat import chat
from gateway.openai.completions import complete
from gateway.openai.responses import respond
from tinsmith.errors import ServiceError

Endpoint = Callable[[Request], Awaitable[Response]]
Schema = TypeVar("Schema", bound=BaseModel)

CLIENT_LEFT = 499
"""Status for a client that has left, as nginx uses it. Only metrics show it."""


def _openai(endpoint: Endpoint) -> Endpoint:
    """Wraps a handler, so that its errors have OpenAI's form."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ServiceError as error:
            return errors.service_error(error)
        except HTTPException as error:
            return errors.http_error(error)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)

    return answer


async def _body(request: Request, schema: type[Schema]) -> Schema:
    config = gateway_of(request).config
    content, raw = await read_json(request, config)
    try:
        async with turn_of(request, len(raw)):
            return await off_loop(lambda: schema.model_validate(content), num_bytes=len(raw), config=config)
    except ValidationError as error:
        raise errors.invalid(error, content) from None


@_openai
async def list_models(request: Request) -> Response:
    """Base models, and the caller's newest checkpoints."""
    data = await sources.list_models(gateway_of(request), owner=owner_of(request))
    return json_response({"object": "list", "data": data})


@_openai
async def get_model(request: Request) -> Response:
    found = await sources.get_model(gateway_of(request), request.path_params["model"], caller=caller_of(request))
    return json_response(found)


@_openai
async def completions(request: Request) -> Response:
    body = await _body(request, schemas.Completion)
    return await complete(gateway_of(request), request, body, caller=caller_of(request))


@_openai
async def chat_completions(request: Request) -> Response:
    body = await _body(request, schemas.Chat)
    return await chat(gateway_of(request), request, body, caller=caller_of(request))


@_openai
async def responses(request: Request) -> Response:
    body = await _body(request, schemas.Respond)
    return await respond(gateway_of(request), request, body, caller=caller_of(request))


@_openai
async def no_such_path(request: Request) -> Response:
    """Refuses any other path below /v1: 405 if the path has another method, else 404."""
    others = [route for route in _ROUTES if route.matches(request.scope)[0] is Match.PARTIAL]
    what = f"{request.method} {request.url.path}"
    if others:
        allowed = ", ".join(sorted(method for route in others for method in route.methods or ()))
        raise HTTPException(405, f"this server has no {what}, only {allowed}", headers={"Allow": allowed})
    raise HTTPException(404, f"this server has no {what}")


_ROUTES = [
    Route("/models", list_models),
    Route("/models/{model:path}", get_model),
    Route("/completions", completions, methods=["POST"]),
    Route("/chat/completions", chat_completions, methods=["POST"]),
    Route("/responses", responses, methods=["POST"]),
]
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
routes: list[BaseRoute] = [*_ROUTES, Route("/{path:path}", no_such_path, methods=_METHODS, include_in_schema=False)]
