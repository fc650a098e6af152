"""Importing adapters: Tinsmith's own endpoint."""

from __future__ import annotations

from starlette.exceptions import HTTPException

from gateway import answers, schemas
from gateway.codec import Request, parse
from gateway.convert import check_ttl
from gateway.http.endpoint import BINARY, POST
from tinsmith.rpc.paths import check_name


async def import_checkpoint(request: Request) -> answers.checkpoints.Imported:
    """Import an adapter made elsewhere.

    The body is a tar archive, plain or compressed, with adapter_config.json and adapter_model.safetensors.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HTTPException(400, f"content-encoding {encoding!r} is not supported; send the archive as it is")
    query = parse(schemas.ImportQuery, dict(request.query_params))
    imported = await request.gateway.storage.imports.run(
        request.stream(),
        num_bytes=int(request.headers.get("content-length") or 0),
        base_model=query.base_model,
        name=check_name(query.name, field="name"),
        ttl_seconds=check_ttl(query.ttl_seconds),
        caller=request.caller,
    )
    return {"path": imported.checkpoint.path, "notes": list(imported.notes)}


routes = [
    POST(
        "/checkpoints/import",
        import_checkpoint,
        asks=schemas.ImportQuery,
        errors=(403, 413, 503),
        also_takes={"application/x-tar": BINARY},
    )
]
