"""Imports of adapters made elsewhere. Each becomes a checkpoint in a training run and a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from gateway.clients import TrainerClient
from gateway.codec import MAX_DRAINED_BYTES, TooLarge
from gateway.config import GatewayConfig
from gateway.convert import checkpoint_row, ttl_of
from gateway.database.operations import IMPORT
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.ids import model_id_of
from gateway.placement import Placement
from gateway.storage.transfers import Transfers
from gateway.tenants.access import Caller
from gateway.tenants.limits import PATIENCE_S, Hold, Limits
from tinsmith.errors import RateLimited, ServiceError
from tinsmith.rpc.paths import TinkerPath
from tinsmith.v1 import trainer_pb2


@dataclass(frozen=True, slots=True)
class Imported:
    checkpoint: Checkpoint
    notes: Sequence[str]
    """Messages of the trainer to the user."""


class Imports:
    """Imports adapters."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        store: Store,
        placement: Placement,
        transfers: Transfers,
        limits: Limits,
    ) -> None:
        self._limits = limits
        self._config = config
        self._store = store
        self._placement = placement
        self._transfers = transfers

    async def run(
        self,
        archive: AsyncIterator[bytes],
        *,
        num_bytes: int,
        base_model: str,
        name: str,
        ttl_seconds: int | None,
        caller: Caller,
    ) -> Imported:
        """Imports the adapter in an archive. `num_bytes`: size of the archive in bytes; 0 when it is not known.

        Raises TooLarge for an archive that is too large, NotReady, RateLimited, BudgetExceeded, and the
        trainer's errors.
        """
        trainer = await self._placement.choose(base_model)
        session = await self._store.sessions.create(owner=caller.owner, key_id=caller.key_id, display_name="import")
        path = TinkerPath(model_id_of(session.session_id, 0), "weights", name)
        header = trainer_pb2.ImportCheckpointHeader(
            location=path.location,
            base_model=base_model,
            ttl=ttl_of(ttl_seconds),
            archive_bytes=num_bytes or None,
        )
        reason, detail = "errored", "the import was not finished"
        hold = self._limits.start(caller.owner)
        operation = self._transfers.operation(IMPORT, path)
        try:
            await self._limits.store(hold, str(path), num_bytes=num_bytes)
            async with self._transfers.noted(operation):
                reply = await self._send(trainer, header, archive, room=lambda: self._room(hold, path))
                row = checkpoint_row(reply.checkpoint, owner=caller.owner)
                await self._transfers.add(row, operation, owner=caller.owner)
            reason, detail = "success", None
        finally:
            hold.release()
            await self._store.sessions.end(session.session_id, reason=reason, detail=detail)
        return Imported(row, list(reply.notes))

    async def _room(self, hold: Hold, path: TinkerPath) -> int | None:
        """Reserves the rest of the owner's quota, and returns its size in bytes; None when there is no quota.

        One import gets the whole rest, because the size of the unpacked archive is not known. Raises RateLimited when
        other saves of the owner take longer than PATIENCE_S, and BudgetExceeded.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await self._limits.store(hold, str(path), num_bytes=None)
            except RateLimited:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(1)

    async def _send(
        self,
        trainer: TrainerClient,
        header: trainer_pb2.ImportCheckpointHeader,
        archive: AsyncIterator[bytes],
        *,
        room: Callable[[], Awaitable[int | None]],
    ) -> trainer_pb2.ImportCheckpointResponse:
        """Sends the archive to the trainer as it arrives. `room` gives the most bytes that the checkpoint may have.

        After a refusal the rest of the archive is still read, up to `MAX_DRAINED_BYTES`, because most clients read no
        answer before they have sent everything.
        """
        limit = self._config.max_import_bytes
        call = trainer.stub.ImportCheckpoint()
        num_bytes = num_dropped = 0
        try:
            await self._write(call, trainer_pb2.ImportCheckpointRequest(header=header))
            async for piece in archive:
                num_bytes += len(piece)
                if num_bytes > limit:
                    call.cancel()
                if call.done():
                    num_dropped += len(piece)
                    if num_dropped > MAX_DRAINED_BYTES:
                        break
                elif piece:
                    await self._write(call, trainer_pb2.ImportCheckpointRequest(archive=piece))
            if num_bytes > limit:
                raise TooLarge(f"the archive has more than {limit} bytes, this server's max_import_bytes")
            if not call.done():
                last = trainer_pb2.ImportCheckpointRequest(complete=True, max_checkpoint_bytes=await room())
                await self._write(call, last)
                await call.done_writing()
            return await call
        finally:
            call.cancel()

    @staticmethod
    async def _write(call: grpc.aio.StreamUnaryCall, request: trainer_pb2.ImportCheckpointRequest) -> None:
        # `_send` reads the error of a call that has ended once the client has sent everything.
        with contextlib.suppress(ServiceError, asyncio.InvalidStateError):
            await call.write(request)
