"""Download URLs: signed and limited in time, so that files can be fetched without a key."""

from __future__ import annotations

import hashlib
import hmac
import re
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

from gateway.clients import TrainerClient
from gateway.config import GatewayConfig
from gateway.database.store import Store
from tinsmith.v1 import trainer_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Download:
    """A signed URL."""

    url: str
    expires_at: float
    """Seconds since 1970."""


class Downloads:
    """Signs download URLs, and checks them."""

    def __init__(self, config: GatewayConfig) -> None:
        self._public_url = config.public_url
        self._lifetime_s = config.download_url_s
        self._secret = config.download_secret.get_secret_value()

    async def start(self, store: Store) -> None:
        """Reads the secret, or makes it. Must be called before any other method."""
        if not self._secret:
            self._secret = await store.settings.get("download_secret", default=secrets.token_hex(32))

    def sign(self, request: Request, *parts: str, version: str = "") -> Download:
        """The URL of /download/PART/PART/..., as the sender of `request` can reach it.

        `version`: the version that the path names now. The URL gives no later version.
        """
        base_url = self._public_url or str(request.base_url).rstrip("/")
        expires_at = int(time.time() + self._lifetime_s)
        path = "/".join(quote(part, safe=":") for part in parts)
        signature = self._signature(parts, version, expires_at)
        query = urlencode({"version": version, "expires": expires_at, "signature": signature})
        return Download(f"{base_url}/download/{path}?{query}", expires_at)

    def check(self, request: Request, *parts: str) -> str:
        """The version that the URL was signed for.

        Raises HTTPException 403 unless the URL was signed for these parts, and 410 when it has expired.
        """
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


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a download: bytes that the gateway makes and files of a checkpoint, one after the other."""

    parts: Sequence[bytes | types_pb2.CheckpointFile]

    @property
    def num_bytes(self) -> int:
        return sum(_size(part) for part in self.parts)

    @property
    def tag(self) -> str:
        """The ETag: a digest of the content."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(part if isinstance(part, bytes) else part.sha256.encode())
        return f'"{digest.hexdigest()}"'

    async def read(self, trainer: TrainerClient, location: str, start: int, stop: int) -> AsyncIterator[bytes]:
        """Opens the parts, and returns an iterator over the bytes `start` to `stop`.

        Raises DataCorrupted for a damaged file, and another ServiceError when a file cannot be opened. So a client gets
        an error instead of a body that breaks off.
        """
        opened: list[AsyncIterator[bytes]] = []
        position = 0
        for part in self.parts:
            begin, end = max(start - position, 0), min(stop - position, _size(part))
            position += _size(part)
            if begin < end:
                if isinstance(part, bytes):
                    opened.append(_once(part[begin:end]))
                else:
                    opened.append(await _open_file(trainer, location, part.name, offset=begin, num_bytes=end - begin))
        return _joined(opened)


def tar(files: Sequence[types_pb2.CheckpointFile], *, modified_at: float) -> Content:
    """A tar archive of the files. It is put together while it is sent, so no copy of it is stored."""
    parts: list[bytes | types_pb2.CheckpointFile] = []
    for file in files:
        info = TarInfo(file.name)
        info.size, info.mtime = file.size_bytes, int(modified_at)
        parts += [info.tobuf(GNU_FORMAT), file, bytes(-file.size_bytes % BLOCKSIZE)]
    return Content([*parts, bytes(2 * BLOCKSIZE)])


def wanted_range(request: Request, content: Content) -> tuple[int, int] | None:
    """The first byte that a Range header asks for, and the first byte behind the range. None means the whole content.

    Raises HTTPException 416 when the range begins behind the end of the content.
    """
    size = content.num_bytes
    if request.headers.get("if-range", content.tag) != content.tag:
        return None
    match = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", request.headers.get("range", ""))  # one range only
    if match is None or match[0] == "bytes=-" or (match[1] and match[2] and int(match[2]) < int(match[1])):
        return None
    if match[1]:
        start, stop = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
    else:
        start, stop = max(0, size - int(match[2])), size
    if start >= stop:
        raise HTTPException(416, f"range: there are {size} bytes", headers={"Content-Range": f"bytes */{size}"})
    return start, stop


def _size(part: bytes | types_pb2.CheckpointFile) -> int:
    return len(part) if isinstance(part, bytes) else part.size_bytes


async def _open_file(
    trainer: TrainerClient, location: str, name: str, *, offset: int, num_bytes: int
) -> AsyncIterator[bytes]:
    request = trainer_pb2.ReadCheckpointFileRequest(location=location, name=name, offset=offset, num_bytes=num_bytes)
    call = trainer.stub.ReadCheckpointFile(request)
    return _pieces(call, await call.read())


async def _pieces(call: Any, first: Any) -> AsyncIterator[bytes]:
    try:
        piece = first
        while piece is not grpc.aio.EOF:
            yield piece.data
            piece = await call.read()
    finally:
        call.cancel()


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _joined(parts: Sequence[AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
    for part in parts:
        async for piece in part:
            yield piece
