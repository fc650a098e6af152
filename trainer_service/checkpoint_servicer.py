"""The RPCs of TrainerService on checkpoint files, which are no operations of a model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, TypeVar

import grpc.aio

from tinsmith.errors import InvalidRequest, NotReady
from tinsmith.rpc.notes import check_notes
from tinsmith.rpc.times import check_ttl
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import trainer_pb2_grpc
from trainer_service.durability.executing import Name, other_work
from trainer_service.intake import dead
from trainer_service.operations.publishing import publication
from trainer_service.storage.locations import Location
from trainer_service.trainer import Trainer

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

_PIECE_BYTES = 1024 * 1024
"""Size of the pieces in which a file is streamed."""


class CheckpointServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """`trainer` is set when the base model is loaded; until then every call fails with NotReady."""

    trainer: Trainer | None = None

    @property
    def _ready(self) -> Trainer:
        if self.trainer is None:
            raise NotReady("the base model is still being loaded")
        return self.trainer

    async def PublishCheckpoint(
        self, request: pb.PublishCheckpointRequest, context: Context
    ) -> pb.PublishCheckpointResponse:
        location = Location.parse(request.location, field="location")
        if not request.version_id:
            raise InvalidRequest("version_id: is empty; GetCheckpoint says what the location holds", field="version_id")
        if request.num_samplers < 0:
            raise InvalidRequest(f"num_samplers: {request.num_samplers} must not be negative", field="num_samplers")
        trainer, publishing = self._ready, self._ready.operations.publishing
        try:
            certified = await publishing.publish(location, request.version_id, num_samplers=request.num_samplers)
        except Exception as error:
            if trainer.scheduler.compute.ends_with(error, publication(location, request.version_id)):
                raise dead(error) from error
            raise
        return pb.PublishCheckpointResponse(num_samplers=certified.num_samplers, certificate=certified.certificate)

    async def GetCertificate(self, request: pb.GetCertificateRequest, context: Context) -> pb.GetCertificateResponse:
        location = Location.parse(request.location, field="location")
        certificate = await self._reads("certificate", location, self._ready.checkpoints.certificate)
        return pb.GetCertificateResponse(certificate=certificate)

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Context) -> pb.GetCheckpointResponse:
        location = Location.parse(request.location, field="location")
        found = await self._reads("manifest", location, self._ready.checkpoints.manifest)
        return pb.GetCheckpointResponse(checkpoint=found.checkpoint, files=list(found.files.values()))

    async def ReadCheckpointFile(
        self, request: pb.ReadCheckpointFileRequest, context: Context
    ) -> AsyncIterator[pb.ReadCheckpointFileResponse]:
        location = Location.parse(request.location, field="location")
        for field, value in (("offset", request.offset), ("num_bytes", request.num_bytes)):
            if value < 0:
                raise InvalidRequest(f"{field}: {value} must not be negative", field=field)
        checkpoints = self._ready.checkpoints
        name = noted("open", location, request.name)
        file = await self.on_checkpoint(name, lambda: checkpoints.reads(checkpoints.open_file, location, request.name))
        try:
            if request.offset > (size := file.seek(0, os.SEEK_END)):
                raise InvalidRequest(f"offset: {request.offset} is beyond the file's {size} bytes", field="offset")
            place = file.seek(request.offset)
            stop = min(size, place + request.num_bytes) if request.HasField("num_bytes") else size
            while place < stop:
                data = await self.on_checkpoint(
                    noted("read", location, f"{request.name} {place}"),
                    partial(checkpoints.reads, _piece, file, min(stop - place, _PIECE_BYTES)),
                )
                if not data:
                    break
                place += len(data)
                yield pb.ReadCheckpointFileResponse(data=data)
        finally:
            file.close()

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: Context
    ) -> pb.VerifyCheckpointResponse:
        location = Location.parse(request.location, field="location")
        files, problems = await self._reads("verify", location, self._ready.checkpoints.verify)
        return pb.VerifyCheckpointResponse(files=files, problems=problems)

    async def ImportCheckpoint(
        self, request_iterator: AsyncIterator[pb.ImportCheckpointRequest], context: Context
    ) -> pb.ImportCheckpointResponse:
        trainer = self._ready
        first = await anext(request_iterator, pb.ImportCheckpointRequest())
        if first.WhichOneof("piece") != "header":
            raise InvalidRequest("header: the first message must hold it", field="header")
        _check_not_last(first)
        trainer.operations.models.check_base_model(first.header.base_model, field="header.base_model")
        check_notes(first.header.user_metadata, field="header.user_metadata")
        if first.header.archive_bytes < 0:
            raise InvalidRequest(
                f"header.archive_bytes: {first.header.archive_bytes} must not be negative", field="header.archive_bytes"
            )

        last = pb.ImportCheckpointRequest()

        async def pieces() -> AsyncIterator[bytes]:
            async for request in request_iterator:
                if request.complete:
                    last.CopyFrom(request)
                    return
                _check_not_last(request)
                if request.WhichOneof("piece") != "archive":
                    raise InvalidRequest("archive: every message between first and last must hold it", field="archive")
                yield request.archive
            raise InvalidRequest("complete: missing in the last message; the archive was cut off", field="complete")

        names: list[Name] = []

        @contextmanager
        def converting(digest: bytes) -> Iterator[None]:
            executing, name = trainer.scheduler.executing, other_work("import archive", digest)
            names.append(name)
            executing.turn_to_store_on_thread(*name)
            with executing.other(name):
                yield

        try:
            return await trainer.importer.run(first.header, pieces(), last=last, converting=converting)
        except Exception as error:
            if names and trainer.scheduler.compute.ends_with(error, names[-1]):
                raise dead(error) from error
            raise

    async def CopyCheckpoint(self, request: pb.CopyCheckpointRequest, context: Context) -> pb.CopyCheckpointResponse:
        if request.HasField("ttl"):
            check_ttl(request.ttl, field="ttl")
        checkpoints = self._ready.checkpoints
        source = Location.parse(request.source, field="source")
        destination = Location.parse(request.destination, field="destination")
        ttl = request.ttl if request.HasField("ttl") else None
        copied = await self.on_checkpoint(
            noted("copy", source, str(destination)),
            lambda: checkpoints.writes_to(destination, checkpoints.copy, source, destination, ttl=ttl),
        )
        return pb.CopyCheckpointResponse(checkpoint=copied)

    async def DeleteCheckpoint(
        self, request: pb.DeleteCheckpointRequest, context: Context
    ) -> pb.DeleteCheckpointResponse:
        location = Location.parse(request.location, field="location")
        checkpoints = self._ready.checkpoints
        await self.on_checkpoint(
            noted("delete", location, request.version_id),
            lambda: checkpoints.writes_to(location, checkpoints.delete, location, version_id=request.version_id),
        )
        return pb.DeleteCheckpointResponse()

    async def _reads(self, what: str, location: Location, call: Callable[[Location], T]) -> T:
        """Calls a method that reads a checkpoint, on a thread for reading. For `what` see `noted`."""
        return await self.on_checkpoint(noted(what, location), lambda: self._ready.checkpoints.reads(call, location))

    async def on_checkpoint(self, name: Name, call: Callable[[], Awaitable[T]]) -> T:
        """Reads or writes a checkpoint for a request that is no operation, with a record of it in case the process ends
        meanwhile. Raises ServiceError for a request that has ended the process too often."""
        scheduler = self._ready.scheduler

        async def noted() -> T:
            await scheduler.executing.turn_to_store(*name)
            try:
                with scheduler.executing.other(name):
                    return await call()
            except Exception as error:
                if scheduler.compute.ends_with(error, name):
                    raise dead(error) from error
                raise

        # Cancelling the call does not end its thread, so the record of the work stays until the thread has ended.
        return await asyncio.shield(scheduler.tasks.spawn(noted()))


def _check_not_last(message: pb.ImportCheckpointRequest) -> None:
    """Raises InvalidRequest for a message with a field that only the last message of an import may hold."""
    if message.HasField("max_checkpoint_bytes"):
        field = "max_checkpoint_bytes"
        raise InvalidRequest(f"{field}: goes with complete, in the last message", field=field)


def _piece(file: BinaryIO, num_bytes: int) -> bytes:
    """The file's next bytes; empty if the file was closed meanwhile, because its client has left."""
    try:
        return file.read(num_bytes)
    except ValueError:
        if file.closed:
            return b""
        raise


def noted(what: str, location: Location, more: str = "") -> Name:
    """Name of a request on a checkpoint, for the record of executions. `what`: one word. `more`: what distinguishes
    requests for the same checkpoint."""
    return other_work(f"{what} {location.run_id}", f"{location} {more}".encode())
