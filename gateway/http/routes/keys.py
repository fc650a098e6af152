"""The caller's own key: facts about it, its revocation, and a JWT for it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.codec import caller_of, detail, gateway_of, json_response
from gateway.tenants.access import Caller
from tinsmith.errors import NotFound


async def auth_token(request: Request) -> Response:
    """A JWT for the key. A request with a JWT gets the same JWT back, so its lifetime is never extended."""
    tokens = gateway_of(request).tenants.tokens
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
    """Revokes the caller's key. 403 for a key of the configuration, which would go on working."""
    gateway, caller = gateway_of(request), caller_of(request)
    if caller.key_hash:
        await gateway.tenants.keys.revoke(caller.key_id, by=caller.owner)
        await gateway.tenants.callers.refresh()
        return json_response({})
    return detail(
        403,
        f"the key {caller.name!r} stays valid: it is set in the server's configuration (api_keys); "
        "the operator of the server can remove it there",
    )


routes = [
    Route("/auth/token", auth_token, methods=["POST"]),
    Route("/auth/apikey/me", get_own_key),
    Route("/auth/apikey/me", delete_own_key, methods=["DELETE"]),
]
