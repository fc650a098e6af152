"""Operations on one checkpoint: its owner may delete, publish and pin it or set its TTL; everyone who may read it can
download it."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import schemas
from gateway.answers import checkpoints as answers
from gateway.codec import caller_of, gateway_of, idempotency_key, json_response, owner_of, parse, read_json
from gateway.convert import check_ttl
from gateway.database.tables.checkpoints import Checkpoint
from gateway.views import certificate_view, checkpoint_details, file_view, time_text
from tinsmith.errors import CheckpointNotFound, DataCorrupted, InvalidRequest
from tinsmith.rpc.paths import KINDS, SCHEME

_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
_BARE = "/training_runs/{run_id}/checkpoints/{name}"
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
    return await gateway_of(request).storage.checkpoints.find(_path(request), field="path", caller=caller_of(request))


async def _find_own(request: Request) -> Checkpoint:
    return await gateway_of(request).storage.checkpoints.find_own(
        _path(request), field="path", caller=caller_of(request)
    )


async def delete(request: Request) -> Response:
    await gateway_of(request).storage.checkpoints.delete(
        _path(request), caller=caller_of(request), idempotency_key=idempotency_key(request)
    )
    return json_response({})


async def without_kind(request: Request, action: str | None = None) -> Response:
    """Refuses a name without its kind, with 400."""
    raise _lacks_kind(request.path_params["run_id"], request.path_params["name"], action)


async def publish(request: Request) -> Response:
    checkpoint = await _find_own(request)
    await gateway_of(request).storage.checkpoints.publish(checkpoint, public=True, owner=owner_of(request))
    return json_response({})


async def unpublish(request: Request) -> Response:
    checkpoint = await _find_own(request)
    await gateway_of(request).storage.checkpoints.publish(checkpoint, public=False, owner=owner_of(request))
    return json_response({})


async def set_ttl(request: Request) -> Response:
    gateway = gateway_of(request)
    content, _ = await read_json(request, gateway.config)
    ttl_seconds = check_ttl(parse(schemas.SetTtl, content).ttl_seconds)
    await gateway.storage.checkpoints.set_ttl(await _find_own(request), ttl_seconds, owner=owner_of(request))
    return json_response({})


async def external_weights_urls(request: Request) -> Response:
    """A signed URL for each file."""
    gateway = gateway_of(request)
    path, caller = _path(request), caller_of(request)
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
    answer: answers.SignedUrls = {"urls": urls, "expires": time_text(expires_at)}
    return json_response(answer)


async def pin(request: Request) -> Response:
    """Tinsmith's own endpoint: pins the checkpoint, so that neither a retention policy nor its TTL deletes it."""
    await gateway_of(request).storage.checkpoints.pin(await _find_own(request), pinned=True, owner=owner_of(request))
    return json_response({})


async def unpin(request: Request) -> Response:
    await gateway_of(request).storage.checkpoints.pin(await _find_own(request), pinned=False, owner=owner_of(request))
    return json_response({})


async def show(request: Request) -> Response:
    """Tinsmith's own endpoint: all facts about the checkpoint, and its files."""
    checkpoint = await _find(request)
    files = await gateway_of(request).storage.checkpoints.files(checkpoint)
    return json_response(checkpoint_details(checkpoint, files))


async def verify(request: Request) -> Response:
    """Tinsmith's own endpoint: the trainer reads every file and compares it with the manifest."""
    checkpoint = await _find(request)
    try:
        found = await gateway_of(request).storage.checkpoints.verify(checkpoint)
    except (DataCorrupted, CheckpointNotFound) as error:  # the manifest is damaged, or all files are gone
        damaged: answers.Verified = {
            "tinker_path": checkpoint.path,
            "intact": False,
            "files": [],
            "problem": error.message,
        }
        return json_response(damaged)
    answer: answers.Verified = {
        "tinker_path": checkpoint.path,
        "intact": not found.problems,
        "files": [{**file_view(file), "problem": found.problems.get(file.name)} for file in found.files],
        "problem": None,
    }
    return json_response(answer)


async def certificate(request: Request) -> Response:
    """Tinsmith's own endpoint: how far the samplers were from the trainer when the version was last published."""
    found = await gateway_of(request).sampling.certificates.of_checkpoint(await _find(request))
    return json_response(certificate_view(found))


async def archive(request: Request) -> Response:
    """The signed URL of a tar archive of the files. SDKs up to 0.30 use it; early ones only follow a 302."""
    gateway = gateway_of(request)
    path, caller = _path(request), caller_of(request)
    checkpoint = await gateway.storage.checkpoints.read(path, field="path", caller=caller, purpose="download")
    download = gateway.storage.downloads.sign(
        request, "archives", *checkpoint.location.split("/"), version=checkpoint.version_id
    )
    headers = {"Location": download.url, "Expires": formatdate(download.expires_at, usegmt=True)}
    answer: answers.SignedUrl = {"url": download.url, "expires": time_text(download.expires_at)}
    return json_response(answer, status=302, headers=headers)


routes = [
    Route(_ONE, delete, methods=["DELETE"]),
    Route(_BARE, without_kind, methods=["DELETE"], include_in_schema=False),
    Route(_ONE, show),
    Route(f"{_ONE}/verify", verify),
    Route(f"{_ONE}/pin", pin, methods=["POST"]),
    Route(f"{_ONE}/pin", unpin, methods=["DELETE"]),
    Route(f"{_ONE}/publish", publish, methods=["POST"]),
    Route(f"{_ONE}/publish", unpublish, methods=["DELETE"]),
    Route(f"{_ONE}/ttl", set_ttl, methods=["PUT"]),
    Route(f"{_ONE}/external_weights_urls", external_weights_urls),
    Route(f"{_ONE}/archive", archive),
    Route(f"{_ONE}/certificate", certificate),
    Route(f"{_BARE}/publish", partial(without_kind, action="publish"), methods=["POST"], include_in_schema=False),
    Route(f"{_BARE}/ttl", partial(without_kind, action="ttl"), methods=["PUT"], include_in_schema=False),
]
