"""The OpenAI API: models, completions, chat completions, responses."""

from __future__ import annotations

from functools import partial

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from gateway import answers, codec
from gateway.codec import Request
from gateway.http.endpoint import Endpoint
from gateway.openai import errors, response_schemas, schemas, sources
from gateway.openai.chat import chat
from gateway.openai.completions import complete
from gateway.openai.responses import respond
from tinsmith.errors import ServiceError

CLIENT_LEFT = 499
"""Status for a request whose client has left, as in nginx. Only metrics show it."""


class _Endpoint(Endpoint):
    """An endpoint whose errors have OpenAI's form."""

    async def answer(self, request: Request) -> Response:
        try:
            return await super().answer(request)
        except ServiceError as error:
            return errors.service_error(error)
        except HTTPException as error:
            return errors.http_error(error)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)

    async def read(self, request: Request, schema: type[BaseModel]) -> BaseModel:
        content = await request.json_object()
        try:
            return await request.work(lambda: schema.model_validate(content))
        except ValidationError as error:
            raise errors.invalid(error, content) from None


async def list_models(request: Request) -> answers.openai.ModelCards:
    """Base models and the newest checkpoints."""
    data = await sources.list_models(request.gateway, owner=request.owner)
    return {"object": "list", "data": data}


async def get_model(request: Request) -> answers.openai.ModelCard:
    """A base model or a checkpoint."""
    return await sources.get_model(request.gateway, request.path_params["model"], caller=request.caller)


async def completions(request: Request, body: schemas.Completion) -> Response:
    """Continue text or tokens."""
    return await complete(request.gateway, request, body, caller=request.caller)


async def chat_completions(request: Request, body: schemas.Chat) -> Response:
    """Answer in a conversation."""
    return await chat(request.gateway, request, body, caller=request.caller)


async def responses(request: Request, body: response_schemas.Respond) -> Response:
    """Answer items of a conversation."""
    return await respond(request.gateway, request, body, caller=request.caller)


async def no_such_path(request: Request) -> Response:
    """Refuses any other path below /v1: 405 if the path has another method, else 404."""
    others = [route for route in _ROUTES if route.matches(request.scope)[0] is Match.PARTIAL]
    what = f"{request.method} {request.url.path}"
    if others:
        allowed = ", ".join(sorted(method for route in others for method in route.methods or ()))
        raise HTTPException(405, f"this server has no {what}, only {allowed}", headers={"Allow": allowed})
    raise HTTPException(404, codec.no_such_path(request))


_get, _post = partial(_Endpoint, "GET"), partial(_Endpoint, "POST")
_draws = partial(_post, errors=(404, 429, 503), also_answers={"text/event-stream": {}})
_ROUTES = [
    _get("/models", list_models),
    _get("/models/{model:path}", get_model, errors=(400, 404, 503)),
    _draws("/completions", completions, answers=answers.openai.Completion),
    _draws("/chat/completions", chat_completions, answers=answers.openai.ChatCompletion),
    _draws("/responses", responses, answers=answers.openai.Response),
]
_OTHER = _get("/{path:path}", no_such_path, include_in_schema=False)
_OTHER.methods = {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
routes = [*_ROUTES, _OTHER]
