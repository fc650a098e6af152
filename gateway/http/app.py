"""The ASGI application: its routes, its middleware, and answers to errors that no route has handled."""

from __future__ import annotations

import functools
import logging

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from gateway import codec
from gateway.config import GatewayConfig
from gateway.database.outages import TRY_AGAIN, DatabaseUnusable
from gateway.futures import JSON, internal_error
from gateway.gateway import Gateway
from gateway.http import middleware
from gateway.http.openapi import document
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
    trainers,
    training,
    weights,
)
from tinsmith.errors import NotReady, ServiceError
from tinsmith.rpc import logs

logger = logging.getLogger(__name__)

GROUPS = (
    futures,
    training,
    sampling,
    sessions,
    service,
    keys,
    telemetry,
    models,
    custom_losses,
    weights,
    runs,
    checkpoints,
    retention,
    imports,
    admin,
    trainers,
)
"""Modules with the routes below /api/v1. A request is compared with one route after the other, so the busiest are
first."""


@functools.cache
def _document() -> bytes:
    return orjson.dumps(document(ROUTES))


async def openapi(request: Request) -> Response:
    """The OpenAPI document of all routes; needs no key."""
    return Response(_document(), media_type=JSON)


ROUTES: list[BaseRoute] = [
    Mount("/api/v1", routes=[route for group in GROUPS for route in group.routes]),
    Mount("/v1", routes=openai.routes),
    service.METRICS,
    Route("/openapi.json", openapi, include_in_schema=False),
    Mount("/download", routes=downloads.routes),
    *dashboard.page_routes,
]


# Errors that no route has handled


async def _database_unusable(request: Request, error: Exception) -> Response:
    logger.error("%s %s: the database cannot be used: %s", request.method, request.url.path, error)
    return await codec.service_error(request, NotReady(TRY_AGAIN))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code == 404 and text == "Not Found":
        text = codec.no_such_path(request)
    elif error.status_code == 405:
        text = f"{request.url.path} does not answer {request.method}"
    return codec.detail(error.status_code, text, headers=dict(error.headers or {}))


async def _gone(request: Request, error: Exception) -> Response:
    """The answer to a client that left in the middle of its body; it appears in metrics only."""
    return codec.detail(400, "the body ended before it was complete")


async def _internal_error(request: Request, error: Exception) -> Response:
    # This answer bypasses the middleware that adds the request id to all others.
    headers = {logs.REQUEST_ID_METADATA: logs.request_id.get()}
    return codec.detail(500, internal_error().message, headers=headers)


def create_app(config: GatewayConfig) -> Starlette:
    """The application. The server that runs it must start and stop `app.state.gateway`."""
    gateway = Gateway(config)
    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(middleware.HostedPaths),
            *([Middleware(middleware.Traces)] if config.tracing else []),
            Middleware(middleware.CountRequests, metrics=gateway.metrics),
            Middleware(middleware.SecurityHeaders),
            Middleware(middleware.OwnHost, callers=gateway.tenants.callers, hosts=config.own_hosts),
            Middleware(
                middleware.Authentication,
                callers=gateway.tenants.callers,
                tokens=gateway.tenants.tokens,
                limits=gateway.tenants.limits,
            ),
            Middleware(middleware.InTurn, samples=gateway.pacer),
            Middleware(middleware.HoldBodies, bodies=gateway.bodies),
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
