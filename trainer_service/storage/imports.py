"""ImportCheckpoint: makes a checkpoint of a tar archive with an adapter that was made elsewhere."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import shutil
import tarfile
import uuid
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import xxhash
import zstandard

from tinsmith.errors import CheckpointExists, InvalidRequest, OutOfCapacity, about
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.peft_files import CONFIG, PICKLE, SAFETENSORS
from tinsmith.modeling.peft_import import import_peft
from tinsmith.rpc.times import check_ttl
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.engine.engine import CapturedState
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.locations import KINDS, Location

_WANTED = (CONFIG, SAFETENSORS, PICKLE)
_MAX_MEMBERS = 1000
_MAX_READ_BYTES = 2**20
_MAX_ZSTD_WINDOW_BYTES = 2**27
_MAX_UPLOADS = 8
_WHAT = "the import"
_XZ = b"\xfd7zXZ\x00"
_BROKEN = (tarfile.TarError, EOFError, OSError, RecursionError, ValueError, zlib.error, zstandard.ZstdError)


class _Stream(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def tell(self) -> int: ...


@dataclass(slots=True)
class Importer:
    """Receives, checks and converts uploaded adapters."""

    base: BaseModel
    checkpoints: CheckpointStore
    max_rank: int
    max_bytes: int
    """Largest archive, and most bytes that it may unpack to."""
    _num_uploads: int = 0
    _converting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(
        self,
        header: pb.ImportCheckpointHeader,
        pieces: AsyncIterator[bytes],
        *,
        last: pb.ImportCheckpointRequest,
        converting: Callable[[bytes], AbstractContextManager[None]],
    ) -> pb.ImportCheckpointResponse:
        """Imports one archive. The caller has checked the base model. `last`: the message that ends the upload; it is
        filled in after `pieces` has ended. `converting`: makes the context in which the archive is read, from a digest
        of the archive; may raise ServiceError.

        Raises InvalidRequest, CheckpointExists, OutOfCapacity, BudgetExceeded.
        """
        location = Location.parse(header.location, field="header.location")
        if location.kind != KINDS[types_pb2.CHECKPOINT_KIND_TRAINING]:
            raise InvalidRequest(
                f"header.location: {header.location!r} is not of kind 'weights'", field="header.location"
            )
        if header.HasField("ttl"):
            check_ttl(header.ttl, field="header.ttl")
        if await self.checkpoints.reads(self.checkpoints.exists, location):
            raise CheckpointExists(f"checkpoint {location} exists; use another name", location=location)
        if self._num_uploads == _MAX_UPLOADS:
            raise OutOfCapacity(f"{_MAX_UPLOADS} imports are running; try again later")
        self._num_uploads += 1
        try:
            size = header.archive_bytes if header.HasField("archive_bytes") else None
            with self.checkpoints.storage.scratch() as folder:
                digest = await self._receive(pieces, folder / "archive", size=size)
                async with self._converting:  # one at a time: the conversion holds an adapter in memory
                    most = last.max_checkpoint_bytes if last.HasField("max_checkpoint_bytes") else None
                    return await self.checkpoints.writes_to(
                        location, self._convert, header, folder, most, converting(digest)
                    )
        finally:
            self._num_uploads -= 1

    async def _receive(self, pieces: AsyncIterator[bytes], path: Path, *, size: int | None) -> bytes:
        """Writes the pieces to `path`, and returns a digest of all. `size`: the archive's size in bytes, if known; an
        archive that does not fit on the disk is then refused before a byte is stored."""
        space, num_bytes, digest = self.checkpoints.storage.space, 0, xxhash.xxh3_128()
        if size is not None:
            space.check(2 * size, what=_WHAT)  # the archive and its unpacked files
        with space.reserve(size or 0, what=_WHAT), path.open("wb") as file:
            async for piece in pieces:
                num_bytes += len(piece)
                digest.update(piece)
                if num_bytes > self.max_bytes:
                    raise InvalidRequest(
                        f"archive: more than {self.max_bytes} bytes, this trainer's max_import_bytes", field="archive"
                    )
                if size is None or num_bytes > size:
                    space.check(len(piece), what=_WHAT)
                await self.checkpoints.writes(file.write, piece)
        return digest.digest()

    def _convert(
        self,
        header: pb.ImportCheckpointHeader,
        folder: Path,
        max_checkpoint_bytes: int | None,
        converting: AbstractContextManager[None],
    ) -> pb.ImportCheckpointResponse:
        with converting:  # on this thread, which a cancelled call does not end
            return self._converted(header, folder, max_checkpoint_bytes)

    def _converted(
        self, header: pb.ImportCheckpointHeader, folder: Path, max_checkpoint_bytes: int | None
    ) -> pb.ImportCheckpointResponse:
        check_room = partial(self.checkpoints.storage.space.check, what=_WHAT)
        unpack(folder / "archive", folder, max_bytes=self.max_bytes, check_room=check_room)
        embedding = self.base.decoder.get_input_embeddings()  # type: ignore[operator]  # a PreTrainedModel
        names = [name for name, module in self.base.decoder.named_modules() if module is embedding]
        frozen = {self.base.head.name: self.base.head.weight_V_H, **dict.fromkeys(names, embedding.weight)}
        with about("archive"):
            imported = import_peft(
                folder, self.base.targets, frozen, base_model=header.base_model, max_rank=self.max_rank
            )
        config = imported.adapter.config
        run_id = header.location.split("/")[0]
        info = types_pb2.CheckpointInfo(
            location=header.location,
            kind=types_pb2.CHECKPOINT_KIND_TRAINING,
            model_id=run_id,
            base_model=header.base_model,
            lora_config=config_to_proto(config),
            version_id=f"{run_id}@{uuid.uuid4().hex}",
            ttl=header.ttl if header.HasField("ttl") else None,
            user_metadata=header.user_metadata,
            optimizer=types_pb2.OPTIMIZER_ADAMW,
        )
        state = CapturedState(config=config, adapter=imported.adapter, step=0, optimizer=None)
        stored = self.checkpoints.save(info, state, overwrite=False, max_bytes=max_checkpoint_bytes)
        return pb.ImportCheckpointResponse(checkpoint=stored, notes=imported.notes)


def unpack(
    archive: Path, folder: Path, *, max_bytes: int, check_room: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Writes the adapter's files, which lie at the top of the archive or in one folder of it, into `folder`.

    Other files are skipped, links are refused, and the archive may unpack to at most `max_bytes`. `check_room`: called
    with each file's size before it is written; may raise. Raises InvalidRequest for a broken archive.
    """
    try:
        with archive.open("rb") as file:
            stream: Any = _Bounded(
                _decompressed(file)
            )  # no complete file object, but it has all methods that tarfile calls
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                _extract(tar, folder, max_bytes=max_bytes, check_room=check_room)
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk, not of the archive
            raise
        raise InvalidRequest(
            f"archive: it cannot be read as a tar file, plain or compressed with gzip, bzip2 or zstd ({error})",
            field="archive",
        ) from None


def _extract(tar: tarfile.TarFile, folder: Path, *, max_bytes: int, check_room: Callable[[int], None]) -> None:
    found: dict[str, str] = {}
    num_bytes = 0
    # Members are taken in the archive's order, because a compressed archive can only be read once, front to back.
    for number, member in enumerate(tar, start=1):
        num_bytes += member.size
        if number > _MAX_MEMBERS or num_bytes > max_bytes:
            raise InvalidRequest(
                f"archive: it unpacks to more than {_MAX_MEMBERS} files or {max_bytes} bytes (max_import_bytes)",
                field="archive",
            )
        *parents, name = member.name.removeprefix("./").split("/")
        if name not in _WANTED or len(parents) > 1:
            continue
        try:
            tarfile.data_filter(member, str(folder))
        except tarfile.FilterError as error:
            raise InvalidRequest(f"archive: {member.name!r} is refused: {error}", field="archive") from None
        if not member.isreg():
            raise InvalidRequest(f"archive: {member.name!r} is not a plain file", field="archive")
        if name in found:
            raise InvalidRequest(f"archive: there are two of {name}: {found[name]}, {member.name}", field="archive")
        found[name] = member.name
        check_room(member.size)
        source = tar.extractfile(member)
        assert source is not None  # extractfile returns None only for members that are no plain files
        with source, (folder / name).open("xb") as destination:
            shutil.copyfileobj(source, destination, _MAX_READ_BYTES)
    if len({name.rpartition("/")[0] for name in found.values()}) > 1:
        raise InvalidRequest(f"archive: {', '.join(found.values())} lie in different folders", field="archive")


def _decompressed(file: BinaryIO) -> _Stream:
    magic = file.read(len(_XZ))
    file.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(file)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES).stream_reader(
            file, read_across_frames=True
        )
    if magic == _XZ:  # an xz header may ask for gigabytes of memory
        raise tarfile.TarError("it is compressed with xz")
    return file


@dataclass(slots=True)
class _Bounded:
    """The stream that tarfile reads from, with a limit on each read: tarfile reads an extended header whole, whatever
    size it claims to have."""

    _stream: _Stream

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= _MAX_READ_BYTES:
            raise tarfile.TarError(f"a header of {size} bytes")
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()
