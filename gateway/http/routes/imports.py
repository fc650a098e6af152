"""Importing adapters: Tinsmith's own endpoint."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway import schemas
from gateway.codec import caller_of, gateway_of, json_response, parse
from gateway.convert import check_ttl
from tinsmith.rpc.paths import check_name


async def import_checkpoint(request: Request) -> Response:
    """Imports an adapter. The body is a tar archive, plain or compressed, with adapter_config.json and
    adapter_model.safetensors."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HTTPException(400, f"content-encoding {encoding!r} is not supported; send the archive as it is")
    query = parse(schemas.ImportQuery, dict(request.query_params))
    imported = await gateway_of(request).storage.imports.run(
        request.stream(),
        num_bytes=int(request.headers.get("content-length") or 0),
        base_model=query.base_model,
        name=check_name(query.name, field="name"),
        ttl_seconds=check_ttl(query.ttl_seconds),
        caller=caller_of(request),
    )
    return json_response({"path": imported.checkpoint.path, "notes": imported.notes})


routes: list[BaseRoute] = [Route("/checkpoints/import", import_checkpoint, methods=["POST"])]
