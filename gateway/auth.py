"""Who may call."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import detail

LOCAL = "local"
"""Owner of everything when any key is accepted."""


def owner_of(key: str) -> str:
    """A name for the holder of a key that does not tell the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


class ApiKeys:
    """ASGI middleware: X-API-Key on everything below /api/, except healthz. The owner goes into request.state."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/api/") or scope["path"].endswith("/healthz"):
            return await self._app(scope, receive, send)
        given = Request(scope).headers.get("x-api-key", "")
        if self._keys and not self._is_known(given.encode()):
            what = "is not a key of this server" if given else "is missing"
            return await detail(401, f"the header X-API-Key {what}; set TINKER_API_KEY")(scope, receive, send)
        scope.setdefault("state", {})["owner"] = owner_of(given) if self._keys else LOCAL
        return await self._app(scope, receive, send)

    def _is_known(self, given: bytes) -> bool:
        # Every key is compared, in constant time: the time tells nothing about them.
        return sum([hmac.compare_digest(given, key) for key in self._keys]) > 0
