"""The caller's own key: facts about it, its revocation, and a JWT for it."""

from __future__ import annotations

from starlette.responses import Response

from gateway import answers
from gateway.codec import Request, detail, json_response
from gateway.http.endpoint import DELETE, GET, POST
from gateway.tenants.access import Caller
from tinsmith.errors import NotFound


async def auth_token(request: Request) -> answers.service.Jwt:
    """A JWT for the key.

    A request with a JWT gets the same JWT back, so its lifetime is never extended.
    """
    tokens = request.gateway.tenants.tokens
    if not tokens.are_used:
        raise NotFound("this server issues no JWTs: its setting jwt_auth is off")
    caller: Caller = request.caller
    return {"jwt": request.state.token or tokens.issue(caller.owner, key_id=caller.key_id, email=caller.email)}


async def get_own_key(request: Request) -> answers.service.OwnKey:
    """Facts about the key."""
    caller: Caller = request.caller
    return {
        "key_id": caller.number,
        "name": caller.name,
        "note": caller.note,
        "details": {
            "org_details": {"name": request.gateway.config.organization},
            "user_details": {"email": caller.email},
        },
    }


async def delete_own_key(request: Request) -> Response:
    """Revoke the key, unless it is set in the configuration.

    403 for a key of the configuration, which would go on working.
    """
    gateway, caller = request.gateway, request.caller
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
    POST("/auth/token", auth_token, errors=(404,)),
    GET("/auth/apikey/me", get_own_key),
    DELETE("/auth/apikey/me", delete_own_key, errors=(403,)),
]
