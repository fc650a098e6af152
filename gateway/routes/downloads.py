"""Files behind signed addresses. No key is asked for: whoever has the address got it from somebody with a key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from gateway import downloads, traces
from gateway.gateway import gateway_of
from gateway.tables import Checkpoint
from tinsmith.rpc.errors import CheckpointNotFound
from tinsmith.rpc.paths import SCHEME
from tinsmith.v1 import types_pb2

_ADAPTER = "adapter_"
"""How the names of an adapter's own files begin; an archive has no optimizer."""


async def _find(request: Request, *, version: str) -> tuple[Checkpoint, Sequence[types_pb2.CheckpointFile]]:
    """410 when something else lies there by now."""
    gateway = gateway_of(request)
    path = SCHEME + "/".join(request.path_params[part] for part in ("run_id", "kind", "name"))
    checkpoint = await gateway.checkpoints.find(path, field="path", caller=None)
    if checkpoint.version_id != version:
        raise HTTPException(410, f"{path} was replaced since this address was made; ask the server for a new one")
    return checkpoint, await gateway.checkpoints.files(checkpoint)


def _stream(content: AsyncIterator[bytes], name: str, *, num_bytes: int, media_type: str) -> Response:
    headers = {"Content-Length": str(num_bytes), "Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(content, media_type=media_type, headers=headers)


def _get(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    """Without HEAD, which Starlette adds to GET: it would read the whole file to send nothing of it."""
    route = Route(path, endpoint, methods=["GET"])
    route.methods = {"GET"}
    return route


async def checkpoint_file(request: Request) -> Response:
    gateway = gateway_of(request)
    parts = [request.path_params[part] for part in ("run_id", "kind", "name", "file")]
    version = gateway.downloads.check(request, "files", *parts)
    checkpoint, files = await _find(request, version=version)
    file = next((file for file in files if file.name == parts[-1]), None)
    if file is None:
        raise CheckpointNotFound(f"{checkpoint.path} has no file {parts[-1]!r} any more")
    trainer = gateway.clients.find_trainer(checkpoint.base_model)
    content = await downloads.open_file(trainer, checkpoint.location, file.name)
    return _stream(content, file.name, num_bytes=file.size_bytes, media_type="application/octet-stream")


async def archive(request: Request) -> Response:
    gateway = gateway_of(request)
    parts = [request.path_params[part] for part in ("run_id", "kind", "name")]
    version = gateway.downloads.check(request, "archives", *parts)
    checkpoint, files = await _find(request, version=version)
    adapter = [file for file in files if file.name.startswith(_ADAPTER)]
    trainer = gateway.clients.find_trainer(checkpoint.base_model)
    content = downloads.tar(trainer, checkpoint.location, adapter, modified_at=checkpoint.created_at)
    size = downloads.tar_size(adapter)
    return _stream(content, f"{parts[-1]}.tar", num_bytes=size, media_type="application/x-tar")


async def trace(request: Request) -> Response:
    """Its length is not known before its end, so it has no Content-Length."""
    gateway = gateway_of(request)
    session_id = request.path_params["session_id"]
    gateway.downloads.check(request, "traces", session_id)
    session = await gateway.store.session(session_id)
    if session is None:
        raise HTTPException(404, f"there is no session {session_id!r}")
    await gateway.ledger.flush()
    content = traces.trace(gateway.store, session)
    headers = {"Content-Disposition": f'attachment; filename="{session_id}.json"'}
    return StreamingResponse(content, media_type="application/json", headers=headers)


routes: list[BaseRoute] = [
    _get("/files/{run_id}/{kind}/{name}/{file}", checkpoint_file),
    _get("/archives/{run_id}/{kind}/{name}", archive),
    _get("/traces/{session_id}", trace),
]
