"""Checkpoints by their public path.

The database is only an index; the trainers' manifests decide. The trainers are asked for a checkpoint that the database
does not have, and for a checkpoint of a run that was made without a gateway.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import delete, or_, update

from gateway.clients import Clients
from gateway.convert import checkpoint_row
from gateway.database.store import Store
from gateway.database.tables.checkpoints import DELETED_AT, Checkpoint, Deletion
from gateway.database.tables.tenants import AuditEvent
from gateway.ids import session_of
from gateway.placement import Placement
from gateway.storage.retired_checkpoints import RetiredCheckpoints
from gateway.tenants.access import Caller
from gateway.tenants.ledger import Ledger, audit_event
from tinsmith.errors import CheckpointNotFound, InvalidRequest, NotFound, NotReady, ServiceError
from tinsmith.rpc.paths import TinkerPath
from tinsmith.v1 import trainer_pb2, types_pb2

logger = logging.getLogger(__name__)

Purpose = Literal["load", "sample", "copy", "download"]
"""The use for which weights of a checkpoint are read."""

_DELETION_RETENTION_S = 86400.0
"""Time for which the key of a deletion is stored, by which a repeat is recognised, in seconds."""
_IS_NOT_DELETED = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at != DELETED_AT)
_DELETION = ("owner", "idempotency_key", "path")
_Deletion = tuple[str, str, str]


class Checkpoints:
    """Finds, changes and deletes checkpoints."""

    def __init__(
        self,
        store: Store,
        clients: Clients,
        placement: Placement,
        *,
        ledger: Ledger,
        retired: RetiredCheckpoints,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: longest wait for trainers that have not been reached since the start, in seconds."""
        self._timeout_s = timeout_s
        self._store = store
        self._clients = clients
        self._placement = placement
        self._ledger = ledger
        self._retired = retired

    async def find(self, path: str, *, field: str, caller: Caller | None) -> Checkpoint:
        """A checkpoint that the caller may read. `caller` None means that the right to read it was checked before.

        Raises InvalidRequest for a bad path, CheckpointNotFound for a missing or expired checkpoint, and NotReady when
        a trainer that may have it cannot be reached.
        """
        parsed = TinkerPath.parse(path, field=field)
        known = await self._store.checkpoints.get(str(parsed))
        if known is None:
            known = await self._find_in_trainers(parsed, caller=caller)
        elif known.expires_at != DELETED_AT and await self._store.sessions.whose(session_of(parsed.run_id)) is None:
            known = await self._look_again(known, parsed)
        is_hidden = known is not None and caller is not None and not caller.reads(known)
        if known is None or is_hidden or known.expires_at == DELETED_AT:
            raise CheckpointNotFound(f"{field}: there is no checkpoint {path}", field=field)
        if known.expires_at is not None and known.expires_at <= time.time() and not known.pinned:
            raise CheckpointNotFound(f"{field}: {path} has expired", field=field)
        return known

    async def find_own(self, path: str, *, field: str, caller: Caller) -> Checkpoint:
        """A checkpoint that the caller may change. Raises the errors of `find`, and CheckpointNotFound also for a
        checkpoint that another owner has published."""
        found = await self.find(path, field=field, caller=caller)
        if not caller.sees(found.owner):
            raise CheckpointNotFound(f"{field}: there is no checkpoint {path}", field=field)
        return found

    async def read(self, path: str, *, field: str, caller: Caller, purpose: Purpose) -> Checkpoint:
        """The checkpoint of `find_usable`, for a caller who gets the weights. Writes the read into the audit log."""
        checkpoint = await self.find_usable(path, field=field, caller=caller, purpose=purpose)
        self.record("checkpoint_read", checkpoint, owner=caller.owner, purpose=purpose)
        return checkpoint

    async def find_usable(self, path: str, *, field: str, caller: Caller, purpose: Purpose) -> Checkpoint:
        """The checkpoint of `find`. Raises the errors of `find`, and InvalidRequest when this kind of checkpoint cannot
        be used for the purpose."""
        checkpoint = await self.find(path, field=field, caller=caller)
        if purpose in ("load", "sample") and checkpoint.kind == "external_weights":
            raise InvalidRequest(
                f"{field}: {path} is made for download; to {purpose} weights, name a checkpoint of save_weights "
                "or save_weights_for_sampler",
                field=field,
            )
        return checkpoint

    async def _find_in_trainers(self, path: TinkerPath, *, caller: Caller | None) -> Checkpoint | None:
        """Asks the trainers for a checkpoint, and indexes it when one of them has it.

        The checkpoint belongs to the owner of its run. When the database has lost the run, too, the first admin who
        asks becomes the owner; until then nobody finds the checkpoint.
        """
        whose = await self._store.sessions.whose(session_of(path.run_id))
        if caller is None or not (caller.admin if whose is None else caller.sees(whose.owner)):
            return None
        info = await self.ask_trainers(path)
        if info is None:
            return None
        row = checkpoint_row(info, owner=caller.owner if whose is None else whose.owner)
        await self._store.checkpoints.put(row)
        return row

    async def _look_again(self, known: Checkpoint, path: TinkerPath) -> Checkpoint | None:
        """The checkpoint that a trainer has at the path now; None when there is none. Corrects the row. This is needed
        for a run that no session here has, because a client of the trainer may have replaced or deleted the
        checkpoint."""
        info = await self.ask_trainers(path)
        if info is None:
            await self._store.checkpoints.delete(known.path, version_id=known.version_id)
            return None
        if info.version_id == known.version_id:
            return known
        row = checkpoint_row(info, owner=known.owner)
        await self._store.checkpoints.put(row)
        return row

    async def ask_trainers(self, path: TinkerPath) -> types_pb2.CheckpointInfo | None:
        """The checkpoint at this path, from the first trainer that has it; None when none has it.

        Raises NotReady when a trainer that may have it cannot be reached.
        """
        for trainer in await self._clients.settle(self._clients.of_each_store, timeout_s=self._timeout_s):
            request = trainer_pb2.GetCheckpointRequest(location=path.location)
            try:
                reply = await trainer.stub.GetCheckpoint(request)
            except NotReady as error:
                raise NotReady(f"the trainer at {trainer.address} cannot be asked for {path}") from error
            except NotFound:
                continue
            return reply.checkpoint
        return None

    async def files(self, checkpoint: Checkpoint) -> Sequence[types_pb2.CheckpointFile]:
        """The files of the checkpoint. Raises CheckpointNotFound and NotReady."""
        trainer = await self._placement.of_checkpoint(checkpoint.location, checkpoint.base_model)
        reply = await trainer.stub.GetCheckpoint(trainer_pb2.GetCheckpointRequest(location=checkpoint.location))
        return list(reply.files)

    async def verify(self, checkpoint: Checkpoint) -> trainer_pb2.VerifyCheckpointResponse:
        """Lets the trainer read and check every file. Raises CheckpointNotFound, NotReady, and DataCorrupted for a
        damaged manifest. The reply names damaged files."""
        trainer = await self._placement.of_checkpoint(checkpoint.location, checkpoint.base_model)
        return await trainer.stub.VerifyCheckpoint(trainer_pb2.VerifyCheckpointRequest(location=checkpoint.location))

    # Changes

    async def publish(self, checkpoint: Checkpoint, *, public: bool, owner: str) -> None:
        """Publishes or unpublishes the checkpoint. Writes no audit event when nothing changes."""
        if checkpoint.public != public:
            event = event_of("checkpoint_publish" if public else "checkpoint_unpublish", checkpoint, owner=owner)
            await self._store.checkpoints.update(checkpoint.path, event, public=public)

    async def set_ttl(self, checkpoint: Checkpoint, ttl_seconds: int | None, *, owner: str) -> None:
        """Sets the lifetime of the checkpoint from now on, in seconds. None means that it never expires."""
        expires_at = None if ttl_seconds is None else time.time() + ttl_seconds
        event = event_of("checkpoint_ttl", checkpoint, owner=owner, ttl_seconds=ttl_seconds)
        await self._store.checkpoints.update(checkpoint.path, event, expires_at=expires_at)

    async def pin(self, checkpoint: Checkpoint, *, pinned: bool, owner: str) -> None:
        """Pins or unpins the checkpoint. Writes no audit event when nothing changes."""
        if checkpoint.pinned != pinned:
            event = event_of("checkpoint_pin" if pinned else "checkpoint_unpin", checkpoint, owner=owner)
            await self._store.checkpoints.update(checkpoint.path, event, pinned=pinned)

    async def keep_for_samplers(self, path: TinkerPath) -> None:
        """Keeps the files at this path for live samplers. Must be called before a save may replace the checkpoint."""
        known = await self._store.checkpoints.get(str(path))
        if known is not None:
            await self._retired.keep_for_samplers(known)

    async def delete(self, path: str, *, caller: Caller, idempotency_key: str | None = None) -> None:
        """Deletes a checkpoint, so that nobody finds it any more. If its trainer is unreachable, the reaper removes the
        files later.

        A repeat with the same `idempotency_key` within a day does nothing. Raises InvalidRequest for a bad path, or
        when no trainer serves the base model. Raises CheckpointNotFound, and NotReady when a trainer that must be asked
        cannot be reached.
        """
        owner = caller.owner
        deletion = None if idempotency_key is None else (owner, idempotency_key, path)
        if deletion is not None and await self._was_deleted(deletion):
            return
        known = await self._store.checkpoints.get(str(TinkerPath.parse(path, field="path")))
        if known is None:
            known = await self.find_own(path, field="path", caller=caller)
        if not caller.sees(known.owner):
            raise CheckpointNotFound(f"path: there is no checkpoint {path}", field="path")
        self._clients.serving(known.base_model)
        await self._mark_deleted(known, deletion, owner=owner)
        try:
            await self._remove(known)
        except NotReady as error:
            logger.warning("%s is deleted, but the reaper must remove its files: %s", known.path, error.message)

    async def _was_deleted(self, deletion: _Deletion) -> bool:
        return await self._store.get(Deletion, deletion) is not None

    async def _mark_deleted(self, checkpoint: Checkpoint, deletion: _Deletion | None, *, owner: str) -> None:
        async with self._store.begin() as db:
            query = update(Checkpoint).where(Checkpoint.path == checkpoint.path, _IS_NOT_DELETED)
            result = await db.execute(query.values(expires_at=DELETED_AT))
            if result.rowcount:  # type: ignore[attr-defined]
                db.add(event_of("checkpoint_delete", checkpoint, owner=owner))
            if deletion is not None:
                await db.merge(Deletion(**dict(zip(_DELETION, deletion, strict=True)), at=time.time()))

    async def forget_deletions(self) -> None:
        """Forgets the keys of deletions that are older than a day."""
        await self._store.run(delete(Deletion).where(Deletion.at < time.time() - _DELETION_RETENTION_S))

    async def prune(self, checkpoint: Checkpoint, *, owner: str) -> bool:
        """Deletes a checkpoint for a retention policy.

        Returns False, and does nothing, when the checkpoint was pinned, published, replaced or deleted meanwhile.
        """
        is_this = (
            Checkpoint.path == checkpoint.path,
            Checkpoint.version_id == checkpoint.version_id,
            ~Checkpoint.pinned,
            ~Checkpoint.public,
            _IS_NOT_DELETED,
        )
        async with self._store.begin() as db:
            result = await db.execute(update(Checkpoint).where(*is_this).values(expires_at=DELETED_AT))
            if not result.rowcount:  # type: ignore[attr-defined]
                return False
            db.add(event_of("checkpoint_prune", checkpoint, owner=owner))
        try:
            await self._remove(checkpoint)
        except ServiceError as error:
            logger.warning("%s is pruned, but the reaper must remove its files: %s", checkpoint.path, error.message)
        return True

    async def expire(self, checkpoint: Checkpoint) -> bool:
        """Removes an expired checkpoint, or a checkpoint whose deletion was not finished. Returns False when another
        gateway was faster.

        Raises the errors of `_remove`.
        """
        was_deleted = checkpoint.expires_at == DELETED_AT
        if not await self._remove(checkpoint):
            return False
        if not was_deleted:
            self.record("checkpoint_expire", checkpoint, owner=checkpoint.owner)
        return True

    async def _remove(self, checkpoint: Checkpoint) -> bool:
        """Removes the files, then the row. Returns False when the row was gone already.

        A newer version that a save has put at the same path stays. Raises InvalidRequest when no trainer serves the
        base model, and NotReady when the trainer cannot be reached.
        """
        trainer = await self._placement.of_checkpoint(checkpoint.location, checkpoint.base_model)
        await self._retired.keep_for_samplers(checkpoint)
        request = trainer_pb2.DeleteCheckpointRequest(location=checkpoint.location, version_id=checkpoint.version_id)
        await trainer.stub.DeleteCheckpoint(request)
        return await self._store.checkpoints.delete(checkpoint.path, version_id=checkpoint.version_id)

    def record(self, event: str, checkpoint: Checkpoint, *, owner: str, **details: Any) -> None:
        """Writes an event into the audit log."""
        self._ledger.add(event_of(event, checkpoint, owner=owner, **details))


def event_of(event: str, checkpoint: Checkpoint, *, owner: str, **details: Any) -> AuditEvent:
    """An event of the audit log that names this checkpoint and its run."""
    return audit_event(event, owner=owner, tinker_path=checkpoint.path, training_run_id=checkpoint.run_id, **details)
