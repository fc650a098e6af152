"""Endpoints. The signature of a handler says what the endpoint takes and answers. It is applied to each request, and
the OpenAPI document is made of it, so each fact is written down once.

    async def assign_project(request: Request, body: schemas.AssignProject) -> answers.service.Empty:

A handler may have a `body`, whose type is a schema of a JSON body, and a `query`, whose type is a schema of URL
parameters. The handler's answer is a TypedDict, which is sent as JSON, or a Response. Facts that the signature does not
show, because the handler reads or makes them itself, are arguments of the endpoint. The first paragraph of the
handler's docstring is the endpoint's summary.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import schemas
from gateway.codec import Request, json_response, parse

BINARY: dict[str, Any] = {"type": "string", "format": "binary"}

Handler = Callable[..., Awaitable[Any]]


class Endpoint(Route):
    """A route to a handler, and the facts about it that the OpenAPI document needs."""

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        *,
        errors: Collection[int] = (),
        takes: type[BaseModel] | None = None,
        asks: type[BaseModel] | None = None,
        answers: Any = None,
        also_takes: Mapping[str, dict[str, Any]] | None = None,
        also_answers: Mapping[str, dict[str, Any]] | None = None,
        status: int = 200,
        needs_key: bool = True,
        unready: Any = None,
        include_in_schema: bool = True,
    ) -> None:
        """`errors`: error statuses, besides those of every endpoint with a body, a query or a key. `takes`, `asks`:
        schema of a body or a query that the handler reads itself. `answers`: type of the JSON of a handler that makes
        its own Response. `also_takes`, `also_answers`: further media types, and their schemas. `status`: status of
        success. `unready`: type of the JSON of status 503, if this status is no error.
        """
        super().__init__(path, handler, methods=[method], include_in_schema=include_in_schema)
        hints = get_type_hints(handler)
        self._reads: type[BaseModel] | None = hints.get("body")
        self.takes = self._reads or takes
        self._query: type[BaseModel] | None = hints.get("query")
        self.asks = self._query or asks
        # Monitoring may add parameters of its own to a path without key.
        self._refuses_query = self.asks is None and needs_key and include_in_schema
        made = hints["return"]
        kinds = get_args(made) if get_origin(made) in (Union, UnionType) else [made]
        self.answers = next((each for each in kinds if each is not Response), answers)
        self.errors = errors
        self.also_takes, self.also_answers = also_takes or {}, also_answers or {}
        self.status, self.needs_key, self.unready = status, needs_key, unready
        self.summary = (inspect.getdoc(handler) or "").partition("\n\n")[0].replace("\n", " ").removesuffix(".")
        self.app = self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        response = await self.answer(request)
        await response(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        given: dict[str, BaseModel] = {}
        if self._query is not None:
            given["query"] = parse(self._query, dict(request.query_params))
        elif self._refuses_query and request.scope["query_string"]:
            parse(schemas.Query, dict(request.query_params))
        if self._reads is not None:
            given["body"] = await self.read(request, self._reads)
        answer = await self.endpoint(request, **given)
        return answer if isinstance(answer, Response) else json_response(answer)

    async def read(self, request: Request, schema: type[BaseModel]) -> BaseModel:
        return parse(schema, await request.json_object())


GET, POST = partial(Endpoint, "GET"), partial(Endpoint, "POST")
PUT, DELETE = partial(Endpoint, "PUT"), partial(Endpoint, "DELETE")

SUBMISSION = (422, 429, 503)
"""Error statuses of submissions: the number was used by another request, too much work, the trainer is unreachable."""
