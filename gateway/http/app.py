"""The ASGI application: routes and middleware."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import re
import secrets
import time
from collections.abc import Iterable

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import codec, schemas
from gateway.codec import parse
from gateway.config import GatewayConfig
from gateway.database.outages import TRY_AGAIN, DatabaseUnusable
from gateway.gateway import Gateway
from gateway.http.browsers import OwnHost, SecurityHeaders
from gateway.http.openapi.document import document
from gateway.http.openapi.operations import OPERATIONS
from gateway.http.routes import (
    admin,
    checkpoints,
    custom_losses,
    dashboard,
    downloads,
    futures,
    imports,
    keys,
    models,
    openai,
    retention,
    runs,
    sampling,
    service,
    sessions,
    telemetry,
    training,
    weights,
)
from gateway.http.tracing import Traces
from gateway.load import Bodies, Pacer, Share
from gateway.metrics import Metrics
from gateway.openai import errors as openai_errors
from gateway.tenants.access import Caller
from gateway.tenants.auth import Callers
from gateway.tenants.limits import Limits
from gateway.tenants.tokens import InvalidToken, Tokens
from tinsmith.errors import NotReady, RateLimited, ServiceError
from tinsmith.rpc import logs
from tinsmith.rpc.auth import given_key

logger = logging.getLogger(__name__)

GROUPS = (
    service,
    keys,
    sessions,
    telemetry,
    models,
    training,
    custom_losses,
    weights,
    sampling,
    futures,
    runs,
    checkpoints,
    retention,
    imports,
    admin,
)
"""Modules with the routes below /api/v1."""


@functools.cache
def _document() -> bytes:
    return orjson.dumps(document(ROUTES))


async def openapi(request: Request) -> Response:
    """The OpenAPI document of all routes; needs no key."""
    return Response(_document(), media_type="application/json")


ROUTES: list[BaseRoute] = [
    Route("/metrics", service.metrics),
    Route("/openapi.json", openapi, include_in_schema=False),
    Mount("/api/v1", routes=[route for group in GROUPS for route in group.routes]),
    Mount("/v1", routes=openai.routes),
    Mount("/download", routes=downloads.routes),
    *dashboard.page_routes,
]


def _without_parameters(app: ASGIApp) -> ASGIApp:
    """Makes a route without parameters refuse every parameter of the URL by name."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["query_string"]:
            parse(schemas.Query, dict(Request(scope).query_params))
        await app(scope, receive, send)

    return checked


def _check_parameters(routes: Iterable[BaseRoute]) -> None:
    """Makes documented routes that have no parameters refuse all of them.

    Routes that need no key, such as health and metrics, are left out, since monitoring may add parameters of its own.
    """
    for route in routes:
        if isinstance(route, Mount):
            _check_parameters(route.routes)
        elif isinstance(route, Route):
            operation = OPERATIONS.get(route.endpoint)
            if operation is not None and operation.needs_key and operation.query is None:
                route.app = _without_parameters(route.app)


_check_parameters(ROUTES)

_HEALTH = "/api/v1/healthz"
_OPENAI = "/v1/"
_PROTECTED = ("/api/", "/dashboard/api/", _OPENAI)
_ID_HEADER = logs.REQUEST_ID_METADATA.encode()
_ID = re.compile(rb"[\w.:-]{1,128}")
_START, _NUMBERS = secrets.token_hex(4), itertools.count()


def _given_id(scope: Scope) -> str:
    """The request's header x-request-id, if it is fit for a log; else empty."""
    given = next((value for name, value in scope["headers"] if name == _ID_HEADER), b"")
    return given.decode() if _ID.fullmatch(given) else ""


class CountRequests:
    """ASGI middleware: counts and times requests by route, and gives each an id for the log and the client."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 500
        started_at = time.monotonic()
        request_id = _given_id(scope) or f"{_START}-{next(_NUMBERS)}"
        logs.request_id.set(request_id)

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (_ID_HEADER, request_id.encode())]
            await send(message)

        try:
            return await self._app(scope, receive, watch)
        finally:
            # By the handler's name: paths with ids would make a time series each. An unknown path has no handler.
            endpoint = scope.get("endpoint")
            route = endpoint.__name__ if inspect.isfunction(endpoint) else "none"
            self._metrics.http.requests.labels(method=scope["method"], route=route, status=status).inc()
            self._metrics.http.request_seconds.labels(route=route).observe(time.monotonic() - started_at)


_BY_THE_HUNDRED = ("/api/v1/asample", "/api/v1/retrieve_future", "/api/v1/cancel_future", "/v1/")
"""Paths of requests that a client sends for each sample, many at once; also retrieve_futures."""


class InTurn:
    """ASGI middleware, inside Authentication: lets a few requests for samples begin in each pass of the event loop, by
    turns among owners (load.py). All other requests overtake them."""

    def __init__(self, app: ASGIApp, *, pacer: Pacer) -> None:
        self._app = app
        self._pacer = pacer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_BY_THE_HUNDRED):
            await self._pacer.turn(scope["state"]["owner"])
        await self._app(scope, receive, send)


_PIECE_BYTES = 256 * 2**10
"""Size of the pieces in which an answer is written. The connection copies what it cannot send yet."""


class HoldBodies:
    """ASGI middleware: puts a Share into request.state.held, and releases it at the end of the request.

    It also sends an answer in pieces, each once the client has read those before. So the request of a client that does
    not read stays open and keeps its share, and an answer that many clients ask for is in memory only once.
    """

    def __init__(self, app: ASGIApp, *, bodies: Bodies) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        share = scope.setdefault("state", {})["held"] = Share(self._bodies)

        async def in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            last = max(0, len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
            for start in range(0, last, _PIECE_BYTES):
                await send({**message, "body": body[start : start + _PIECE_BYTES], "more_body": True})
            await send({**message, "body": body[last:]} if last else message)

        try:
            await self._app(scope, receive, in_pieces)
        finally:
            share.release()


_FRONT = "/services/tinker-prod"
_HOSTED_OPENAI = "/oai/api/v1/"


class HostedPaths:
    """ASGI middleware, outside all others: rewrites paths of the hosted service to this server's paths.

    So everything behind it, such as the check of keys, knows only one form of a path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(_FRONT)
            if path.startswith(_HOSTED_OPENAI):
                path = f"/v1/{path.removeprefix(_HOSTED_OPENAI)}"
            if path.startswith("/"):
                scope["path"] = path
        await self._app(scope, receive, send)


class Authentication:
    """ASGI middleware for everything below /api/ and /v1/ except healthz.

    Sets request.state.owner, .caller and .token: the JWT that the request came with, or "".
    """

    def __init__(self, app: ASGIApp, *, callers: Callers, tokens: Tokens, limits: Limits) -> None:
        self._app = app
        self._callers = callers
        self._tokens = tokens
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_PROTECTED) or scope["path"] == _HEALTH:
            return await self._app(scope, receive, send)
        request = Request(scope)
        credential = given_key(request.headers)
        is_token = self._tokens.are_used and credential.startswith("eyJ")  # the SDK tells a JWT from a key in this way
        try:
            caller = await self._by_token(credential) if is_token else await self._callers.find(credential)
        except InvalidToken as error:
            return await _refusal(scope, str(error), challenge="invalid_token")(scope, receive, send)
        if caller is None:
            what = "holds no key of this server (it may be revoked or expired)" if credential else "is missing"
            if scope["path"].startswith(_OPENAI):
                text = f"the header Authorization: Bearer KEY (or X-API-Key) {what}; set OPENAI_API_KEY"
            else:
                text = f"the header X-API-Key (or Authorization: Bearer KEY) {what}; set TINKER_API_KEY"
            return await _refusal(scope, text)(scope, receive, send)
        try:
            self._limits.request(caller, scope["method"], scope["path"])
        except RateLimited as error:
            is_openai = scope["path"].startswith(_OPENAI)
            reply = openai_errors.service_error(error) if is_openai else await codec.service_error(request, error)
            return await reply(scope, receive, send)
        state = scope.setdefault("state", {})
        state["owner"], state["caller"], state["token"] = caller.owner, caller, credential if is_token else ""
        logs.owner.set(caller.owner)
        return await self._app(scope, receive, send)

    async def _by_token(self, token: str) -> Caller:
        caller = await self._callers.find_id(self._tokens.key_id_of(token))
        if caller is None:
            raise InvalidToken("the key that this JWT was issued for is no longer a key of this server")
        return caller


def _refusal(scope: Scope, text: str, *, challenge: str = "") -> Response:
    """The answer 401. The challenge "invalid_token" (RFC 6750) makes the SDK ask for a new JWT, once."""
    headers = {"WWW-Authenticate": f'Bearer error="{challenge}"' if challenge else "Bearer"}
    if scope["path"].startswith(_OPENAI):
        return codec.json_response(
            openai_errors.error_body(401, text, code="invalid_api_key"), status=401, headers=headers
        )
    return codec.detail(401, text, headers=headers)


# Errors that no route has handled


async def _database_unusable(request: Request, error: Exception) -> Response:
    logger.error("%s %s: the database cannot be used: %s", request.method, request.url.path, error)
    return await codec.service_error(request, NotReady(TRY_AGAIN))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code == 404 and text == "Not Found":
        text = f"this server has no {request.method} {request.url.path}"
    elif error.status_code == 405:
        text = f"{request.url.path} does not answer {request.method}"
    return codec.detail(error.status_code, text, headers=dict(error.headers or {}))


async def _gone(request: Request, error: Exception) -> Response:
    """The answer to a client that left in the middle of its body; it appears in metrics only."""
    return codec.detail(400, "the body ended before it was complete")


async def _internal_error(request: Request, error: Exception) -> Response:
    # This answer bypasses the middleware that adds the request id to all others.
    headers = {logs.REQUEST_ID_METADATA: logs.request_id.get()}
    return codec.detail(500, "internal error of the gateway; its log has the cause", headers=headers)


def create_app(config: GatewayConfig) -> Starlette:
    """The application. The server that runs it must start and stop `app.state.gateway`."""
    gateway = Gateway(config)
    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(HostedPaths),
            *([Middleware(Traces)] if config.tracing else []),
            Middleware(CountRequests, metrics=gateway.metrics),
            Middleware(SecurityHeaders),
            Middleware(OwnHost, callers=gateway.tenants.callers, hosts=config.own_hosts),
            Middleware(
                Authentication,
                callers=gateway.tenants.callers,
                tokens=gateway.tenants.tokens,
                limits=gateway.tenants.limits,
            ),
            Middleware(InTurn, pacer=gateway.pacer),
            Middleware(HoldBodies, bodies=gateway.bodies),
        ],
        exception_handlers={
            HTTPException: _http_error,
            ServiceError: codec.service_error,
            DatabaseUnusable: _database_unusable,
            ClientDisconnect: _gone,
            Exception: _internal_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app
