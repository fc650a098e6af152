"""Saved states by their public path. The store is an index: what it does not know, the trainers' manifests may."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

import grpc.aio

from gateway.clients import Clients, Trainer, is_lost
from gateway.convert import checkpoint_row
from gateway.ledger import Ledger
from gateway.retirement import Retirement
from gateway.store import Store
from gateway.tables import Checkpoint
from tinsmith.rpc.errors import CheckpointNotFound, InvalidRequest, NotFound, NotReady, from_rpc_error
from tinsmith.rpc.paths import TinkerPath
from tinsmith.v1 import trainer_pb2, types_pb2

logger = logging.getLogger(__name__)

Purpose = Literal["load", "sample", "copy", "download"]
"""Why somebody reads weights."""

_DELETED_AT = 0.0
"""As a time of expiry: it was deleted, and its files go as soon as the trainer does it."""

_MAX_DELETIONS = 10_000


class Checkpoints:
    def __init__(
        self, store: Store, clients: Clients, *, ledger: Ledger, retirement: Retirement, timeout_s: float
    ) -> None:
        """`timeout_s`: how long to wait for trainers that have not been reached since the start."""
        self._timeout_s = timeout_s
        self._store = store
        self._clients = clients
        self._ledger = ledger
        self._retirement = retirement
        self._deletions: dict[tuple[str, str | None, str], None] = {}  # owner, idempotency key and path; oldest first

    async def find(self, path: str, *, field: str, owner: str) -> Checkpoint:
        """Raises InvalidRequest for what is no path, CheckpointNotFound for a missing or expired one, and NotReady
        when a trainer that may have it cannot be reached."""
        parsed = TinkerPath.parse(path, field=field)
        known = await self._store.checkpoint(str(parsed))
        if known is None:
            known = await self._find_in_trainers(parsed, owner=owner)
        if known is None or known.expires_at == _DELETED_AT:
            raise CheckpointNotFound(f"{field}: there is no checkpoint {path}", field=field)
        if known.expires_at is not None and known.expires_at <= time.time():
            raise CheckpointNotFound(f"{field}: {path} has expired", field=field)
        return known

    async def read(self, path: str, *, field: str, owner: str, purpose: Purpose) -> Checkpoint:
        """`find`, for somebody who will have the weights: the audit log names them.

        Raises InvalidRequest too when the checkpoint is not of a kind for that.
        """
        checkpoint = await self.find(path, field=field, owner=owner)
        if purpose in ("load", "sample") and checkpoint.kind == "external_weights":
            raise InvalidRequest(
                f"{field}: {path} is made for download; to {purpose} weights, name a checkpoint of save_weights "
                "or save_weights_for_sampler",
                field=field,
            )
        self.record("checkpoint_read", checkpoint, owner=owner, purpose=purpose)
        return checkpoint

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

    async def files(self, checkpoint: Checkpoint) -> Sequence[types_pb2.CheckpointFile]:
        """What it consists of. Raises CheckpointNotFound, NotReady."""
        trainer = self._clients.find_trainer(checkpoint.base_model)
        try:
            reply = await trainer.stub.GetCheckpoint(trainer_pb2.GetCheckpointRequest(location=checkpoint.location))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return list(reply.files)

    # Changes

    async def publish(self, checkpoint: Checkpoint, *, public: bool, owner: str) -> None:
        """Once more changes nothing."""
        if checkpoint.public != public:
            await self._store.update_checkpoint(checkpoint.path, public=public)
            self.record("checkpoint_publish" if public else "checkpoint_unpublish", checkpoint, owner=owner)

    async def set_ttl(self, checkpoint: Checkpoint, ttl_seconds: int | None, *, owner: str) -> None:
        """From now; None: it never expires."""
        expires_at = None if ttl_seconds is None else time.time() + ttl_seconds
        await self._store.update_checkpoint(checkpoint.path, expires_at=expires_at)
        self.record("checkpoint_ttl", checkpoint, owner=owner, ttl_seconds=ttl_seconds)

    async def keep_for_samplers(self, path: TinkerPath) -> None:
        """To be called before a save may replace the checkpoint: samplers of the old one go on."""
        known = await self._store.checkpoint(str(path))
        if known is not None:
            await self._retirement.keep_for_samplers(known)

    async def delete(self, path: str, *, owner: str, idempotency_key: str | None = None) -> None:
        """It is gone for everyone at once; its files are too, or when the trainer can be reached again. The same key
        again changes nothing: this process remembers the newest _MAX_DELETIONS.

        Raises InvalidRequest for what is no path, or a base model that no trainer serves; CheckpointNotFound; and
        NotReady when that cannot be known yet.
        """
        deletion = (owner, idempotency_key, path)
        if deletion in self._deletions:
            return
        known = await self._store.checkpoint(str(TinkerPath.parse(path, field="path")))
        if known is None:
            known = await self.find(path, field="path", owner=owner)
        self._clients.find_trainer(known.base_model)
        if known.expires_at != _DELETED_AT:
            await self._store.update_checkpoint(known.path, expires_at=_DELETED_AT)
            self.record("checkpoint_delete", known, owner=owner)
        if idempotency_key is not None:
            self._deletions[deletion] = None
            if len(self._deletions) > _MAX_DELETIONS:
                del self._deletions[next(iter(self._deletions))]
        try:
            await self._remove(known)
        except NotReady as error:
            logger.warning("%s is deleted, but the reaper must remove its files: %s", known.path, error.message)

    async def expire(self, checkpoint: Checkpoint) -> None:
        """Frees the disk of an expired checkpoint, or of one whose deletion did not come to its end."""
        was_deleted = checkpoint.expires_at == _DELETED_AT
        await self._remove(checkpoint)
        if not was_deleted:
            self.record("checkpoint_expire", checkpoint, owner=checkpoint.owner)

    async def _remove(self, checkpoint: Checkpoint) -> None:
        """Removes the files, then the row. Raises NotReady when the trainer cannot be reached."""
        trainer: Trainer = self._clients.find_trainer(checkpoint.base_model)
        await self._retirement.keep_for_samplers(checkpoint)
        try:
            await trainer.stub.DeleteCheckpoint(trainer_pb2.DeleteCheckpointRequest(location=checkpoint.location))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        await self._store.delete_checkpoint(checkpoint.path)

    def record(self, event: str, checkpoint: Checkpoint, *, owner: str, **details: Any) -> None:
        """Writes an event into the audit log."""
        self._ledger.audit(
            event, owner=owner, tinker_path=checkpoint.path, training_run_id=checkpoint.run_id, **details
        )
