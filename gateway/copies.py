"""Copies of checkpoints, each in a training run of its own that cannot be trained."""

from __future__ import annotations

import time

import grpc.aio

from gateway.checkpoints import Checkpoints
from gateway.clients import Clients
from gateway.convert import checkpoint_row
from gateway.store import Store
from gateway.tables import Checkpoint, Model
from tinsmith.rpc.errors import AlreadyExists, CheckpointExists, InvalidRequest, SequenceConflict, from_rpc_error
from tinsmith.rpc.paths import TinkerPath
from tinsmith.v1 import trainer_pb2


class Copies:
    def __init__(self, store: Store, clients: Clients, checkpoints: Checkpoints) -> None:
        self._store = store
        self._clients = clients
        self._checkpoints = checkpoints

    async def into_project(
        self, source: Checkpoint, project_id: str, *, ttl_seconds: int | None, owner: str, idempotency_key: str | None
    ) -> Checkpoint:
        """A new session of the project owns it. The same key again gives the same copy."""
        name = f"copy of {source.path}"
        session = await self._store.create_session(
            owner=owner,
            idempotency_key=None if idempotency_key is None else f"copy:{idempotency_key}",
            project_id=project_id,
            display_name=name,
            sdk_version=None,
            tags=[],
            user_metadata={},
        )
        if (session.display_name, session.project_id) != (name, project_id):
            raise InvalidRequest(f"X-Idempotency-Key: {idempotency_key!r} was used for another copy before")
        # Nobody sends its heartbeats: it has ended as soon as it has begun.
        await self._store.end_session(session.session_id, reason="success", detail=None)
        return await self.into_run(source, f"{session.session_id}:train:0", ttl_seconds=ttl_seconds, owner=owner)

    async def into_run(self, source: Checkpoint, run_id: str, *, ttl_seconds: int | None, owner: str) -> Checkpoint:
        """A new run of an existing session owns it. Raises SequenceConflict when the run is taken by something else.

        What it raises otherwise comes from the trainer.
        """
        _, kind, name = source.location.split("/")
        path = TinkerPath(run_id, kind, name)
        known = await self._store.model(run_id)
        if known is not None and known.released_at is None:
            raise SequenceConflict(f"model_seq_id: {run_id} is a training run already")
        trainer = self._clients.find_trainer(source.base_model)
        request = trainer_pb2.CopyCheckpointRequest(
            source=source.location, destination=path.location, ttl_seconds=ttl_seconds
        )
        try:
            reply = await trainer.stub.CopyCheckpoint(request)
        except grpc.aio.AioRpcError as error:
            cause = from_rpc_error(error)
            if not isinstance(cause, CheckpointExists):
                raise cause from error
            return await self._made_before(source, path, owner=owner)
        row = checkpoint_row(reply.checkpoint, owner=owner)
        await self.add_run(row, user_metadata={})
        if await self._store.put_checkpoint(row):
            self._checkpoints.record("checkpoint_copy", source, owner=owner, copy=row.path)
        return row

    async def _made_before(self, source: Checkpoint, path: TinkerPath, *, owner: str) -> Checkpoint:
        found = await self._checkpoints.find(str(path), field="source_path", owner=owner)
        if found.version_id != source.version_id:
            raise AlreadyExists(f"model_seq_id: {path} is taken by another checkpoint")
        await self.add_run(found, user_metadata={})
        return found

    async def add_run(self, checkpoint: Checkpoint, *, user_metadata: dict[str, str]) -> None:
        """The trainer never has it, so it is released from its beginning."""
        now = time.time()
        await self._store.add_model(
            Model(
                model_id=checkpoint.run_id,
                session_id=checkpoint.run_id.rpartition(":train:")[0],
                base_model=checkpoint.base_model,
                optimizer=checkpoint.optimizer,
                lora_rank=checkpoint.lora_rank,
                train_unembed=checkpoint.train_unembed,
                train_mlp=checkpoint.train_mlp,
                train_attn=checkpoint.train_attn,
                user_metadata=user_metadata,
                created_at=now,
                released_at=now,
            )
        )
