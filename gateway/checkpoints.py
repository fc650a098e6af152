"""Saved states by their public path. The store is an index: what it does not know, the trainers' manifests may."""

from __future__ import annotations

import time

import grpc.aio

from gateway.clients import Clients, Trainer, is_lost
from gateway.convert import checkpoint_row
from gateway.store import Store
from gateway.tables import Checkpoint
from tinsmith.rpc.errors import CheckpointNotFound, NotFound, NotReady, from_rpc_error
from tinsmith.rpc.paths import TinkerPath
from tinsmith.v1 import trainer_pb2


class Checkpoints:
    def __init__(self, store: Store, clients: Clients, *, timeout_s: float) -> None:
        """`timeout_s`: how long to wait for trainers that have not been reached since the start."""
        self._timeout_s = timeout_s
        self._store = store
        self._clients = clients

    async def find(self, path: str, *, field: str, owner: str) -> Checkpoint:
        """Raises InvalidRequest for what is no path, CheckpointNotFound for a missing or expired one, and NotReady
        when a trainer that may have it cannot be reached."""
        parsed = TinkerPath.parse(path, field=field)
        missing = CheckpointNotFound(f"{field}: there is no checkpoint {path}", field=field)
        known = await self._store.checkpoint(str(parsed))
        if known is None:
            known = await self._find_in_trainers(parsed, owner=owner)
        if known is None:
            raise missing
        if known.expires_at is not None and known.expires_at <= time.time():
            raise CheckpointNotFound(f"{field}: {path} has expired", field=field)
        return known

    async def _find_in_trainers(self, path: TinkerPath, *, owner: str) -> Checkpoint | None:
        """Asks every trainer, and indexes what one finds again."""
        for trainer in await self._clients.settle(self._clients.all_trainers, timeout_s=self._timeout_s):
            request = trainer_pb2.GetCheckpointRequest(location=path.location)
            try:
                reply = await trainer.stub.GetCheckpoint(request)
            except grpc.aio.AioRpcError as error:
                if is_lost(error):
                    raise NotReady(f"the trainer at {trainer.address} cannot be asked for {path}") from error
                cause = from_rpc_error(error)
                if isinstance(cause, NotFound):
                    continue
                raise cause from error
            row = checkpoint_row(reply.checkpoint, owner=owner)
            await self._store.put_checkpoint(row)
            return row
        return None

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Removes the files, then the row. Raises NotReady when the trainer cannot be reached."""
        trainer: Trainer = self._clients.find_trainer(checkpoint.base_model)
        try:
            await trainer.stub.DeleteCheckpoint(trainer_pb2.DeleteCheckpointRequest(location=checkpoint.location))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        await self._store.delete_checkpoint(checkpoint.path)
