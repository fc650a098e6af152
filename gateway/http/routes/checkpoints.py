"""Operations on one checkpoint: its owner may delete, publish and pin it or set its TTL; everyone who may read it can
download it."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import partial

from starlette.responses import Response
from starlette.routing import Route

from gateway import answers, schemas
from gateway.codec import Request, json_response
from gateway.convert import check_ttl
from gateway.database.tables.checkpoints import Checkpoint
from gateway.http.endpoint import DELETE, GET, POST, PUT
from gateway.views import certificate_view, checkpoint_details, file_view, time_text
from tinsmith.errors import CheckpointNotFound, DataCorrupted, InvalidRequest
from tinsmith.rpc.paths import KINDS, SCHEME

_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
_BARE = "/training_runs/{run_id}/checkpoints/{name}"
_ERRORS = (400, 404, 503)
_ACTIONS = ("archive", "publish", "ttl")
"""Actions below a checkpoint that SDKs also ask for with a name that lacks its kind."""


def _lacks_kind(run_id: str, name: str, action: str | None = None) -> InvalidRequest:
    """The error for a name without its kind, which several checkpoints may have."""
    end = f"/{action}" if action else ""
    forms = " or ".join(f"/training_runs/{run_id}/checkpoints/{kind}/{name}{end}" for kind in KINDS)
    return InvalidRequest(f"checkpoint_id: {name!r} lacks its kind; ask for {forms}", field="checkpoint_id")


def _path(request: Request) -> str:
    run_id, kind, name = (str(request.path_params[part]) for part in ("run_id", "kind", "name"))
    if kind not in KINDS and name in _ACTIONS:
        raise _lacks_kind(run_id, kind, name)
    return f"{SCHEME}{run_id}/{kind}/{name}"


async def _find(request: Request) -> Checkpoint:
    return await request.gateway.storage.checkpoints.find(_path(request), field="path", caller=request.caller)


async def _find_own(request: Request) -> Checkpoint:
    return await request.gateway.storage.checkpoints.find_own(_path(request), field="path", caller=request.caller)


async def delete(request: Request) -> answers.service.Empty:
    """Delete a checkpoint."""
    await request.gateway.storage.checkpoints.delete(
        _path(request), caller=request.caller, idempotency_key=request.idempotency_key
    )
    return {}


async def without_kind(request: Request, action: str | None = None) -> Response:
    """Refuses a name without its kind, with 400."""
    raise _lacks_kind(request.path_params["run_id"], request.path_params["name"], action)


async def publish(request: Request) -> answers.service.Empty:
    """Publish a checkpoint."""
    checkpoint = await _find_own(request)
    await request.gateway.storage.checkpoints.publish(checkpoint, public=True, owner=request.owner)
    return {}


async def unpublish(request: Request) -> answers.service.Empty:
    """Unpublish a checkpoint."""
    checkpoint = await _find_own(request)
    await request.gateway.storage.checkpoints.publish(checkpoint, public=False, owner=request.owner)
    return {}


async def set_ttl(request: Request, body: schemas.SetTtl) -> answers.service.Empty:
    """Set when a checkpoint expires."""
    gateway = request.gateway
    ttl_seconds = check_ttl(body.ttl_seconds)
    await gateway.storage.checkpoints.set_ttl(await _find_own(request), ttl_seconds, owner=request.owner)
    return {}


async def external_weights_urls(request: Request) -> answers.checkpoints.SignedUrls:
    """Signed URLs of a checkpoint's files."""
    gateway = request.gateway
    path, caller = _path(request), request.caller
    if request.path_params["kind"] != "external_weights":
        raise InvalidRequest(f"path: {path} is not of kind external_weights; save_weights_external makes one")
    checkpoint = await gateway.storage.checkpoints.read(path, field="path", caller=caller, purpose="download")
    signed = {
        file.name: gateway.storage.downloads.sign(
            request, "files", *checkpoint.location.split("/"), file.name, version=checkpoint.version_id
        )
        for file in await gateway.storage.checkpoints.files(checkpoint)
    }
    expires_at = min((download.expires_at for download in signed.values()), default=time.time())
    urls = {name: download.url for name, download in signed.items()}
    return {"urls": urls, "expires": time_text(expires_at)}


async def pin(request: Request) -> answers.service.Empty:
    """Pin a checkpoint: neither retention nor TTL deletes it.

    Tinsmith's own endpoint.
    """
    await request.gateway.storage.checkpoints.pin(await _find_own(request), pinned=True, owner=request.owner)
    return {}


async def unpin(request: Request) -> answers.service.Empty:
    """Unpin a checkpoint."""
    await request.gateway.storage.checkpoints.pin(await _find_own(request), pinned=False, owner=request.owner)
    return {}


async def show(request: Request) -> answers.checkpoints.CheckpointDetails:
    """A checkpoint and its files.

    Tinsmith's own endpoint.
    """
    checkpoint = await _find(request)
    files = await request.gateway.storage.checkpoints.files(checkpoint)
    return checkpoint_details(checkpoint, files)


async def verify(request: Request) -> answers.checkpoints.Verified:
    """Read all files of a checkpoint and compare them with their checksums.

    Tinsmith's own endpoint.
    """
    checkpoint = await _find(request)
    try:
        found = await request.gateway.storage.checkpoints.verify(checkpoint)
    except (DataCorrupted, CheckpointNotFound) as error:  # the manifest is damaged, or all files are gone
        return {"tinker_path": checkpoint.path, "intact": False, "files": [], "problem": error.message}
    return {
        "tinker_path": checkpoint.path,
        "intact": not found.problems,
        "files": [{**file_view(file), "problem": found.problems.get(file.name)} for file in found.files],
        "problem": None,
    }


async def certificate(request: Request) -> answers.checkpoints.Certificate:
    """Certificate of a checkpoint: how far the samplers were from the trainer at the last publish.

    Tinsmith's own endpoint.
    """
    found = await request.gateway.sampling.certificates.of_checkpoint(await _find(request))
    return certificate_view(found)


async def archive(request: Request) -> Response:
    """Signed URL of an archive of a checkpoint.

    SDKs up to 0.33 use it; early ones only follow a 302.
    """
    gateway = request.gateway
    path, caller = _path(request), request.caller
    checkpoint = await gateway.storage.checkpoints.read(path, field="path", caller=caller, purpose="download")
    download = gateway.storage.downloads.sign(
        request, "archives", *checkpoint.location.split("/"), version=checkpoint.version_id
    )
    headers = {"Location": download.url, "Expires": formatdate(download.expires_at, usegmt=True)}
    answer: answers.checkpoints.SignedUrl = {"url": download.url, "expires": time_text(download.expires_at)}
    return json_response(answer, status=302, headers=headers)


routes = [
    DELETE(_ONE, delete, errors=_ERRORS),
    Route(_BARE, without_kind, methods=["DELETE"], include_in_schema=False),
    GET(_ONE, show, errors=_ERRORS),
    GET(f"{_ONE}/verify", verify, errors=_ERRORS),
    POST(f"{_ONE}/pin", pin, errors=_ERRORS),
    DELETE(f"{_ONE}/pin", unpin, errors=_ERRORS),
    POST(f"{_ONE}/publish", publish, errors=_ERRORS),
    DELETE(f"{_ONE}/publish", unpublish, errors=_ERRORS),
    PUT(f"{_ONE}/ttl", set_ttl, errors=(404, 503)),
    GET(f"{_ONE}/external_weights_urls", external_weights_urls, errors=_ERRORS),
    GET(f"{_ONE}/archive", archive, errors=_ERRORS, answers=answers.checkpoints.SignedUrl, status=302),
    GET(f"{_ONE}/certificate", certificate, errors=_ERRORS),
    Route(f"{_BARE}/publish", partial(without_kind, action="publish"), methods=["POST"], include_in_schema=False),
    Route(f"{_BARE}/ttl", partial(without_kind, action="ttl"), methods=["PUT"], include_in_schema=False),
]
