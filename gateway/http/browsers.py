"""Protection against pages of other sites in a user's browser.

A gateway without keys trusts everything that reaches its loopback address. Any page that the user opens can do so: with
a form or a fetch to http://127.0.0.1:8000, or under its own host name, which it has made to point there (DNS
rebinding). The header Origin shows the first, the header Host the second. There is no CORS, so no page of another
origin can read an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.codec import detail
from gateway.tenants.auth import Callers
from tinsmith.rpc.auth import is_loopback

_OF_EVERYTHING = {"X-Content-Type-Options": "nosniff"}
_OF_PAGES = {
    # img-src: the icon, and charts that a page draws itself.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound to it
"""Addresses that lead to this machine's loopback address, too. No page of another site has such a host name."""


class SecurityHeaders:
    """ASGI middleware that adds security headers for browsers. A header that an answer has already stays."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                is_page = headers.get("content-type", "").startswith("text/html")
                for name, value in (_OF_EVERYTHING | (_OF_PAGES if is_page else {})).items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, add)


class OwnHost:
    """ASGI middleware for a gateway without keys: refuses requests of other sites' pages.

    A request without Origin is safe. Browsers always send Origin, except with a plain GET, and no GET changes anything
    in a gateway.
    """

    def __init__(self, app: ASGIApp, *, callers: Callers, hosts: Iterable[str]) -> None:
        """`hosts`: further names and addresses of the gateway, beside the loopback ones."""
        self._app = app
        self._callers = callers
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._callers.anyone:
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._is_own(_name(f"//{host}")):
            text = (
                f"host: {host[:100]!r} is no name of this gateway, which has no keys and so answers under loopback "
                "names only; use http://127.0.0.1, or list the name in GATEWAY_ALLOWED_HOSTS"
            )
            return await detail(421, text)(scope, receive, send)
        if origin is not None and not self._is_same(origin, host):
            text = (
                f"origin: {origin[:100]!r} is another site; a gateway without keys answers to no pages but its own. "
                "Set GATEWAY_API_KEYS to let others in"
            )
            return await detail(403, text)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _is_own(self, name: str) -> bool:
        return is_loopback(name) or name in _UNSPECIFIED or name in self._hosts

    def _is_same(self, origin: str, host: str) -> bool:
        """Whether the origin is this gateway. The whole host is compared, since another port is another server; with a
        configured host only the name, since a proxy may change the header Host."""
        return _name(origin) in self._hosts or origin.lower().partition("://")[2] == host.lower()


def _name(url: str) -> str:
    """The host of SCHEME://HOST or SCHEME://HOST:PORT; empty for any other text."""
    match = re.fullmatch(r"[a-z]*:?//(?:\[([0-9a-f:.]+)\]|([^][:/?#@\s]+))(?::[0-9]*)?", url.lower())
    return "" if match is None else match[1] or match[2]
