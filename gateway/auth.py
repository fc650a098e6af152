"""Who may call: holders of a key, or of a JWT that was given for one (gateway/tokens.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import detail, json_response
from gateway.openai.errors import error_body
from gateway.tokens import InvalidToken, Tokens
from tinsmith.rpc.auth import ApiKey, KeyRing, given_key

LOCAL = "local"
"""Owner of everything when any key is accepted."""

_HEALTH = "/api/v1/healthz"
_OPENAI = "/v1/"
_PROTECTED = ("/api/", _OPENAI)


def owner_of(key: str) -> str:
    """A name for the holder of a key that does not tell the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, as far as the configuration tells."""

    owner: str
    key_id: int
    """The same at every start, wherever the key stands in the list."""
    name: str
    note: str = ""
    email: str = ""


_ANYONE = Caller(LOCAL, 0, "any key", "this server accepts any key, from its own machine only")


class Callers:
    """All that may call. Without keys, that is anyone."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._ring = KeyRing(key.key.get_secret_value() for key in keys)
        self._callers: list[Caller] = []
        for position, key in enumerate(keys):
            owner = owner_of(key.key.get_secret_value())
            name = key.name or f"api_keys[{position}]"
            self._callers.append(Caller(owner, int(owner[:12], 16), name, key.note, key.email))

    @property
    def anyone(self) -> bool:
        return not self._callers

    def by_key(self, key: str) -> Caller | None:
        if self.anyone:
            return _ANYONE
        position = self._ring.find(key)
        return None if position is None else self._callers[position]

    def by_owner(self, owner: str) -> Caller | None:
        known = [_ANYONE] if self.anyone else self._callers
        return next((caller for caller in known if caller.owner == owner), None)


class Authentication:
    """ASGI middleware for everything below /api/ and /v1/ except healthz.

    It leaves in request.state: `owner`, `caller`, and `token`, which is the JWT that the request came with or "".
    """

    def __init__(self, app: ASGIApp, *, callers: Callers, tokens: Tokens) -> None:
        self._app = app
        self._callers = callers
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_PROTECTED) or scope["path"] == _HEALTH:
            return await self._app(scope, receive, send)
        credential = given_key(Request(scope).headers)
        is_token = self._tokens.are_used and credential.startswith("eyJ")  # as the SDK tells them apart
        try:
            caller = self._by_token(credential) if is_token else self._callers.by_key(credential)
        except InvalidToken as error:
            return await _refusal(scope, str(error), challenge="invalid_token")(scope, receive, send)
        if caller is None:
            what = "holds no key of this server" if credential else "is missing"
            text = f"the header X-API-Key (or Authorization: Bearer KEY) {what}; set TINKER_API_KEY"
            return await _refusal(scope, text)(scope, receive, send)
        state = scope.setdefault("state", {})
        state["owner"], state["caller"], state["token"] = caller.owner, caller, credential if is_token else ""
        return await self._app(scope, receive, send)

    def _by_token(self, token: str) -> Caller:
        caller = self._callers.by_owner(self._tokens.owner_of(token))
        if caller is None:
            raise InvalidToken("the key that this JWT was issued for is no longer a key of this server")
        return caller


def _refusal(scope: Scope, text: str, *, challenge: str = "") -> Response:
    """401. The SDK asks for a new JWT, once, when it reads the challenge "invalid_token" (RFC 6750)."""
    headers = {"WWW-Authenticate": f'Bearer error="{challenge}"' if challenge else "Bearer"}
    if scope["path"].startswith(_OPENAI):
        return json_response(error_body(401, text, code="invalid_api_key"), status=401, headers=headers)
    return detail(401, text, headers=headers)
