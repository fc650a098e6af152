"""Files behind signed URLs. They need no key, because only callers with a key get such a URL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from gateway import traces
from gateway.codec import Request
from gateway.database.tables.checkpoints import Checkpoint
from gateway.futures import JSON
from gateway.http import openapi_bodies
from gateway.http.endpoint import BINARY, GET
from gateway.storage import downloads
from gateway.storage.downloads import Content
from tinsmith.errors import CheckpointNotFound
from tinsmith.rpc.paths import SCHEME
from tinsmith.v1 import types_pb2

_OPTIMIZER = "optimizer."
"""Beginning of the names of files that an archive leaves out."""


async def _find(request: Request, *, version: str) -> tuple[Checkpoint, Sequence[types_pb2.CheckpointFile]]:
    """The checkpoint of the path, and its files. Raises HTTPException 410 when the path has another version by now."""
    gateway = request.gateway
    path = SCHEME + "/".join(request.path_params[part] for part in ("run_id", "kind", "name"))
    checkpoint = await gateway.storage.checkpoints.find(path, field="path", caller=None)
    if checkpoint.version_id != version:
        raise HTTPException(410, f"{path} was replaced since this address was made; ask the server for a new one")
    return checkpoint, await gateway.storage.checkpoints.files(checkpoint)


async def _answer(
    request: Request, checkpoint: Checkpoint, content: Content, *, name: str, media_type: str
) -> Response:
    """The content, or the range that was asked for; for HEAD only the headers."""
    wanted = downloads.wanted_range(request, content)
    start, stop = wanted or (0, content.num_bytes)
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Length": str(stop - start),
        "ETag": content.tag,
    }
    status = 200
    if wanted is not None:
        status = 206
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{content.num_bytes}"
    if request.method == "HEAD":
        return Response(status_code=status, media_type=media_type, headers=headers)
    trainer = await request.gateway.placement.of_checkpoint(checkpoint.location, checkpoint.base_model)
    body = await content.read(trainer, checkpoint.location, start, stop)
    return StreamingResponse(body, status, media_type=media_type, headers=headers)


async def checkpoint_file(request: Request) -> Response:
    """A file, by its signed URL."""
    parts = [request.path_params[part] for part in ("run_id", "kind", "name", "file")]
    version = request.gateway.storage.downloads.check(request, "files", *parts)
    checkpoint, files = await _find(request, version=version)
    file = next((file for file in files if file.name == parts[-1]), None)
    if file is None:
        raise CheckpointNotFound(f"{checkpoint.path} has no file {parts[-1]!r} any more")
    content = downloads.Content([file])
    return await _answer(request, checkpoint, content, name=file.name, media_type="application/octet-stream")


async def archive(request: Request) -> Response:
    """An archive, by its signed URL."""
    parts = [request.path_params[part] for part in ("run_id", "kind", "name")]
    version = request.gateway.storage.downloads.check(request, "archives", *parts)
    checkpoint, files = await _find(request, version=version)
    weights = [file for file in files if not file.name.startswith(_OPTIMIZER)]
    content = downloads.tar(weights, modified_at=checkpoint.created_at)
    return await _answer(request, checkpoint, content, name=f"{parts[-1]}.tar", media_type="application/x-tar")


async def trace(request: Request) -> Response:
    """A timeline, by its signed URL.

    It has no Content-Length, because its length is not known before its end.
    """
    gateway = request.gateway
    session_id = request.path_params["session_id"]
    gateway.storage.downloads.check(request, "traces", session_id)
    session = await gateway.store.sessions.get(session_id)
    if session is None:
        raise HTTPException(404, f"there is no session {session_id!r}")
    await gateway.ledger.caught_up()
    content = traces.trace(gateway.store, session)
    headers = {"Content-Disposition": f'attachment; filename="{session_id}.json"'}
    return StreamingResponse(content, media_type=JSON, headers=headers)


_SIGNED = partial(GET, asks=openapi_bodies.SignedQuery, needs_key=False)
_FILE_ERRORS = (403, 404, 410, 503)

# Starlette adds HEAD to GET, which would make the whole timeline and then send nothing of it.
_TRACE = _SIGNED("/traces/{session_id}", trace, errors=(403, 404, 410), answers=dict[str, Any])
_TRACE.methods = {"GET"}

routes = [
    _SIGNED(
        "/files/{run_id}/{kind}/{name}/{file}",
        checkpoint_file,
        errors=_FILE_ERRORS,
        also_answers={"application/octet-stream": BINARY},
    ),
    _SIGNED(
        "/archives/{run_id}/{kind}/{name}",
        archive,
        errors=_FILE_ERRORS,
        also_answers={"application/x-tar": BINARY},
    ),
    _TRACE,
]
