"""The middleware: ASGI applications around the routes, listed in the order in which a request passes them (app.py).

`OwnHost` and `SecurityHeaders` protect a user's browser. A gateway without keys trusts everything that reaches its
loopback address. Any page that the user opens can reach it: with a form or a fetch to http://127.0.0.1:8000, or under
the page's own host name, which its owner has made to point there (DNS rebinding). The header Origin shows the first
way, the header Host the second. There is no CORS, so no page of another origin can read an answer.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import secrets
import time
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import codec
from gateway.http.connections import BEGAN_S
from gateway.load import Bodies, Pacer, Share
from gateway.metrics import Metrics
from gateway.openai import errors as openai_errors
from gateway.tenants.access import Caller
from gateway.tenants.auth import Callers
from gateway.tenants.limits import Limits
from gateway.tenants.tokens import InvalidToken, Tokens
from tinsmith.errors import RateLimited
from tinsmith.received_answers import request_begins
from tinsmith.rpc import logs, tracing
from tinsmith.rpc.auth import given_key, is_loopback

_HEALTH = "/api/v1/healthz"
_OPENAI = "/v1/"
_PROTECTED = ("/api/", "/dashboard/api/", _OPENAI)
_ID_HEADER = logs.REQUEST_ID_METADATA.encode()
_RETRIES = b"x-stainless-retry-count"
"""Header with which the SDK says how often it has sent the request before."""
_ID = re.compile(rb"[\w.:-]{1,128}")
_START, _NUMBERS = secrets.token_hex(4), itertools.count()


_FRONT = "/services/tinker-prod"
_HOSTED_OPENAI = "/oai/api/v1/"
_TINKER = "/api/v1/"
_OPENAI_BELOW_TINKER = frozenset(_TINKER + name for name in ("models", "completions", "chat/completions", "responses"))
"""Paths of OpenAI's API that a client has with the Tinker API's base URL. `models/{model}` is not among them, because
early SDKs have `models/{run_id}/checkpoints`."""


class HostedPaths:
    """ASGI middleware, outside all others: rewrites paths of the hosted service, and OpenAI's resources below the
    Tinker API, to this server's paths.

    So everything behind this middleware, such as the check of keys, knows only one form of a path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(_FRONT)
            if path.startswith(_HOSTED_OPENAI):
                path = f"{_OPENAI}{path.removeprefix(_HOSTED_OPENAI)}"
            elif path in _OPENAI_BELOW_TINKER:
                path = f"{_OPENAI}{path.removeprefix(_TINKER)}"
            if path.startswith("/"):
                scope["path"] = path
        await self._app(scope, receive, send)


_POLLED = ("/api/v1/retrieve_future", "/api/v1/session_heartbeat", "/api/v1/healthz", "/metrics")
"""Paths with these beginnings are polled, and get no trace. The work that a poll waits for has a trace of its own."""


class Traces:
    """ASGI middleware that traces requests, for a gateway with --tracing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_POLLED):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        span = tracing.answer(f"{scope['method']} {scope['path']}", headers, **attributes)
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if (endpoint := scope.get("endpoint")) is not None:
                # The span is named by the endpoint, because a path may hold an id. Below a mount, an unknown path has
                # the router as its endpoint, which has no name.
                span.update_name(f"{scope['method']} {getattr(endpoint, '__name__', 'unknown')}")
            tracing.end(span, error=f"HTTP {status}" if status >= 500 else "")


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
        is_retry = any(name == _RETRIES and value != b"0" for name, value in scope["headers"])
        request_begins(scope.get(BEGAN_S), is_retry=is_retry)
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
            # Requests are counted by the handler's name, because each path with an id would make a time series. An
            # unknown path has no handler.
            endpoint = scope.get("endpoint")
            route = endpoint.__name__ if inspect.isfunction(endpoint) else "none"
            self._metrics.http.requests.labels(scope["method"], route, status).inc()
            self._metrics.http.request_seconds.labels(route).observe(time.monotonic() - started_at)


_OF_EVERYTHING = [(b"x-content-type-options", b"nosniff")]
_OF_PAGES = [
    *_OF_EVERYTHING,
    (
        b"content-security-policy",  # img-src: the icon, and charts that a page draws itself
        b"default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        b"object-src 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
]


class SecurityHeaders:
    """ASGI middleware that adds security headers for browsers. A header that an answer has already stays."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = dict(message.get("headers", ()))
                is_page = headers.get(b"content-type", b"").startswith(b"text/html")
                added = [each for each in (_OF_PAGES if is_page else _OF_EVERYTHING) if each[0] not in headers]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, add)


_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound to it
"""Addresses that lead to this machine's loopback address, too. No page of another site has such a host name."""


class OwnHost:
    """ASGI middleware for a gateway without keys: refuses requests of other sites' pages.

    A request without Origin is safe. Browsers always send Origin, except with a plain GET, and no GET changes anything
    in a gateway.
    """

    def __init__(self, app: ASGIApp, *, callers: Callers, hosts: Iterable[str]) -> None:
        """`hosts`: names and addresses of the gateway besides the loopback names."""
        self._app = app
        self._callers = callers
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._callers.anyone:
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_own(host):
            text = (
                f"host: {host[:100]!r} is no name of this gateway, which has no keys and so answers under loopback "
                "names only; use http://127.0.0.1, or list the name in GATEWAY_ALLOWED_HOSTS"
            )
            return await codec.detail(421, text)(scope, receive, send)
        if origin is not None and not self._is_same(origin, host):
            text = (
                f"origin: {origin[:100]!r} is another site; a gateway without keys answers to no pages but its own. "
                "Set GATEWAY_API_KEYS to let others in"
            )
            return await codec.detail(403, text)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        name = _name(f"//{host}")
        return name in _UNSPECIFIED or name in self._hosts or is_loopback(name)

    def _is_same(self, origin: str, host: str) -> bool:
        """Whether the origin is this gateway. For a configured host only the name is compared, because a proxy may
        change the header Host. Otherwise the port is compared, too, because another port is another server."""
        return _name(origin) in self._hosts or origin.lower().partition("://")[2] == host.lower()


@functools.lru_cache(256)
def _name(url: str) -> str:
    """The host of SCHEME://HOST or SCHEME://HOST:PORT; empty for any other text."""
    match = re.fullmatch(r"[a-z]*:?//(?:\[([0-9a-f:.]+)\]|([^][:/?#@\s]+))(?::[0-9]*)?", url.lower())
    return "" if match is None else match[1] or match[2]


class Authentication:
    """ASGI middleware that finds the caller of each request below /api/, /dashboard/api/ and /v1/, except healthz, and
    refuses requests without a valid key.

    Sets `owner`, `caller` and `token` of request.state. The token is the JWT of the request, or "".
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


_BY_THE_HUNDRED = ("/api/v1/asample", "/api/v1/retrieve_future", "/api/v1/cancel_future", "/v1/")
"""Beginnings of the paths of requests that a client sends for each sample, many at once; also of retrieve_futures."""


_HEARTBEAT = "/api/v1/session_heartbeat"


class InTurn:
    """ASGI middleware, inside Authentication: lets a few requests begin in each pass of the event loop, by turns among
    owners (load.py).

    Requests for samples have turns of their own, so an owner's training overtakes the owner's samples. Heartbeats
    overtake all others. Requests without a key, such as health checks, wait for no turn.
    """

    def __init__(self, app: ASGIApp, *, samples: Pacer) -> None:
        """`samples`: the turns of requests for samples."""
        self._app = app
        self._samples = samples
        self._others = Pacer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = scope.get("state", {}).get("owner")
        if owner is not None and scope["path"] != _HEARTBEAT:
            is_sample = scope["path"].startswith(_BY_THE_HUNDRED)
            await (self._samples if is_sample else self._others).turn(owner)
        await self._app(scope, receive, send)


_PIECE_BYTES = 256 * 2**10
"""Size of the pieces in which an answer is written. The connection copies what it cannot send yet."""


class HoldBodies:
    """ASGI middleware: puts a Share into request.state.body_share, and releases it at the end of the request.

    The middleware also sends an answer in pieces, each once the client has read the pieces before. So the request of a
    client that does not read stays open and keeps its share, and an answer that many clients ask for is in memory only
    once.
    """

    def __init__(self, app: ASGIApp, *, bodies: Bodies) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        share = state["body_share"] = Share(self._bodies, state.get("owner", ""))

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
