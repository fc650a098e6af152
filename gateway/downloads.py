"""Addresses from which files can be fetched without a key, for a while: they carry a signature instead."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from tarfile import BLOCKSIZE, GNU_FORMAT, TarInfo
from typing import Any
from urllib.parse import quote, urlencode

import grpc.aio
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gateway.clients import Trainer
from gateway.config import GatewayConfig
from gateway.store import Store
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.v1 import trainer_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Download:
    url: str
    expires_at: float


class Downloads:
    def __init__(self, config: GatewayConfig) -> None:
        self._public_url = config.public_url
        self._lifetime_s = config.download_url_s
        self._secret = config.download_secret.get_secret_value()

    async def start(self, store: Store) -> None:
        """To be called once before any other method."""
        if not self._secret:
            self._secret = await store.setting("download_secret", default=secrets.token_hex(32))

    def sign(self, request: Request, *parts: str, version: str = "") -> Download:
        """The address of /download/PART/PART/..., as the sender of `request` can reach it.

        `version`: what lies there now; the address is good for nothing else that comes to lie there.
        """
        base_url = self._public_url or str(request.base_url).rstrip("/")
        expires_at = int(time.time() + self._lifetime_s)
        path = "/".join(quote(part, safe=":") for part in parts)
        signature = self._signature(parts, version, expires_at)
        query = urlencode({"version": version, "expires": expires_at, "signature": signature})
        return Download(f"{base_url}/download/{path}?{query}", expires_at)

    def check(self, request: Request, *parts: str) -> str:
        """The version that it was signed for. 403 unless it was signed for these parts, 410 when its time is over."""
        names = ("version", "expires", "signature")
        version, expires, signature = (request.query_params.get(name, "") for name in names)
        is_time = expires.isascii() and expires.isdigit() and len(expires) < 12
        expected = self._signature(parts, version, int(expires)) if is_time else ""
        if not is_time or not hmac.compare_digest(signature.encode(), expected.encode()):
            raise HTTPException(403, "this address was not signed by this server, or was changed")
        if int(expires) <= time.time():
            raise HTTPException(410, "this address has expired; ask the server for a new one")
        return version

    def _signature(self, parts: Sequence[str], version: str, expires_at: int) -> str:
        text = "\0".join([*parts, version, str(expires_at)])
        return hmac.new(self._secret.encode(), text.encode(), hashlib.sha256).hexdigest()


async def open_file(trainer: Trainer, location: str, name: str) -> AsyncIterator[bytes]:
    """Its bytes, as they arrive. What goes wrong at the beginning is raised here, as a ServiceError."""
    call = trainer.stub.ReadCheckpointFile(trainer_pb2.ReadCheckpointFileRequest(location=location, name=name))
    try:
        first = await call.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return _pieces(call, first)


async def _pieces(call: Any, first: Any) -> AsyncIterator[bytes]:
    try:
        piece = first
        while piece is not grpc.aio.EOF:
            yield piece.data
            piece = await call.read()
    finally:
        call.cancel()


def _padding(size: int) -> int:
    return -size % BLOCKSIZE


def tar_size(files: Sequence[types_pb2.CheckpointFile]) -> int:
    """Of the archive that `tar` makes."""
    bodies = sum(BLOCKSIZE + file.size_bytes + _padding(file.size_bytes) for file in files)
    return bodies + 2 * BLOCKSIZE


async def tar(
    trainer: Trainer, location: str, files: Sequence[types_pb2.CheckpointFile], *, modified_at: float
) -> AsyncIterator[bytes]:
    """A tar archive, without a copy of it anywhere."""
    for file in files:
        info = TarInfo(file.name)
        info.size, info.mtime = file.size_bytes, int(modified_at)
        yield info.tobuf(GNU_FORMAT)
        async for piece in await open_file(trainer, location, file.name):
            yield piece
        yield bytes(_padding(file.size_bytes))
    yield bytes(2 * BLOCKSIZE)
