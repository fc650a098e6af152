"""What a caller can learn about its own key, and the JWT that it can get for it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.auth import Caller
from gateway.errors import detail, json_response
from gateway.gateway import gateway_of
from tinsmith.rpc.errors import NotFound


async def auth_token(request: Request) -> Response:
    """A JWT for the key. A JWT gets itself back: it lives no longer than it was to live."""
    tokens = gateway_of(request).tokens
    if not tokens.are_used:
        raise NotFound("this server issues no JWTs: its setting jwt_auth is off")
    caller: Caller = request.state.caller
    return json_response(
        {"jwt": request.state.token or tokens.issue(caller.owner, key_id=caller.key_id, email=caller.email)}
    )


async def get_own_key(request: Request) -> Response:
    caller: Caller = request.state.caller
    return json_response(
        {
            "key_id": caller.number,
            "name": caller.name,
            "note": caller.note,
            "details": {
                "org_details": {"name": gateway_of(request).config.organization},
                "user_details": {"email": caller.email},
            },
        }
    )


async def delete_own_key(request: Request) -> Response:
    """Always 403: a key lives in the configuration, and an answer of success would leave it working."""
    caller: Caller = request.state.caller
    return detail(
        403,
        f"the key {caller.name!r} stays valid: keys of this server are set in its configuration (api_keys); "
        "who runs the server can take it out there",
    )


routes = [
    Route("/auth/token", auth_token, methods=["POST"]),
    Route("/auth/apikey/me", get_own_key),
    Route("/auth/apikey/me", delete_own_key, methods=["DELETE"]),
]
