"""Copies of checkpoints, each in a training run of its own that cannot be trained."""

from __future__ import annotations

from gateway.clients import TrainerClient
from gateway.convert import checkpoint_row, ttl_of
from gateway.database.operations import COPY
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.ids import fingerprint, model_id_of, session_of
from gateway.placement import Placement
from gateway.storage.checkpoints import Checkpoints
from gateway.storage.transfers import Transfers
from gateway.tenants.access import Caller
from gateway.tenants.limits import Limits
from tinsmith.errors import AlreadyExists, CheckpointExists, CheckpointNotFound, InvalidRequest, SequenceConflict
from tinsmith.rpc.paths import TinkerPath
from tinsmith.v1 import trainer_pb2


class Copies:
    """Makes copies of checkpoints."""

    def __init__(
        self,
        store: Store,
        placement: Placement,
        checkpoints: Checkpoints,
        *,
        limits: Limits,
        transfers: Transfers,
    ) -> None:
        self._transfers = transfers
        self._limits = limits
        self._store = store
        self._placement = placement
        self._checkpoints = checkpoints

    async def into_project(
        self, source_path: str, project_id: str, *, ttl_seconds: int | None, caller: Caller, idempotency_key: str | None
    ) -> Checkpoint:
        """Copies a checkpoint into a new session of the project.

        A repeat with the same `idempotency_key` gives the same copy, even when its source is gone. Raises the errors of
        `into_run`, and InvalidRequest when the key was used for another copy.
        """
        name = f"copy of {TinkerPath.parse(source_path, field='source_path')}"
        key = None if idempotency_key is None else f"copy:{idempotency_key}"
        session = await self._store.sessions.of_key(caller.owner, key)
        if session is None:
            await self._checkpoints.find(source_path, field="source_path", caller=caller)
            session = await self._store.sessions.create(
                owner=caller.owner,
                key_id=caller.key_id,
                idempotency_key=key,
                project_id=project_id,
                display_name=name,
            )
        if (session.display_name, session.project_id) != (name, project_id):
            raise InvalidRequest(f"X-Idempotency-Key: {idempotency_key!r} was used for another copy before")
        # No client sends heartbeats for this session, so it ends at once.
        await self._store.sessions.end(session.session_id, reason="success", detail=None)
        return await self.into_run(
            source_path, model_id_of(session.session_id, 0), ttl_seconds=ttl_seconds, caller=caller
        )

    async def into_run(self, source_path: str, run_id: str, *, ttl_seconds: int | None, caller: Caller) -> Checkpoint:
        """Copies a checkpoint into a new run of an existing session. While the copy exists, a repeat gives the same
        copy.

        Raises AlreadyExists (SequenceConflict for a training run) when the run or the copy's path is taken,
        CheckpointNotFound, NotReady, RateLimited, BudgetExceeded, and the trainer's errors.
        """
        asked = TinkerPath.parse(source_path, field="source_path")
        path = TinkerPath(run_id, asked.kind, asked.name)
        known = await self._store.models.get(run_id)
        if known is not None and known.released_at is None:
            raise SequenceConflict(f"model_seq_id: {run_id} is a training run already")
        if (copy := await self._copied(asked, path, ttl_seconds=ttl_seconds, caller=caller)) is not None:
            return copy
        source = await self._checkpoints.find(source_path, field="source_path", caller=caller)
        trainer = await self._placement.of_checkpoint(source.location, source.base_model)
        whose = await self._store.sessions.whose(session_of(run_id))
        assert whose is not None
        hold = self._limits.start(whose.owner)
        try:
            await self._limits.store(hold, str(path), num_bytes=source.size_bytes)
            return await self._copy(trainer, source, path, ttl_seconds=ttl_seconds, caller=caller, owner=whose.owner)
        finally:
            hold.release()

    async def _copy(
        self,
        trainer: TrainerClient,
        source: Checkpoint,
        path: TinkerPath,
        *,
        ttl_seconds: int | None,
        caller: Caller,
        owner: str,
    ) -> Checkpoint:
        request = trainer_pb2.CopyCheckpointRequest(
            source=source.location, destination=path.location, ttl=ttl_of(ttl_seconds)
        )
        operation = self._transfers.operation(COPY, path, source=source.path, mark=_mark(ttl_seconds))
        async with self._transfers.noted(operation):
            try:
                reply = await trainer.stub.CopyCheckpoint(request)
            except CheckpointExists:
                row = await self._made_before(source, path, ttl_seconds=ttl_seconds, caller=caller)
            else:
                row = checkpoint_row(reply.checkpoint, owner=owner)
            await self._transfers.add(row, operation, owner=caller.owner)
        return row

    async def _copied(
        self, source: TinkerPath, path: TinkerPath, *, ttl_seconds: int | None, caller: Caller
    ) -> Checkpoint | None:
        """The copy of `source` at `path`; None when there is none.

        Raises AlreadyExists when `path` is a copy of another source, or has another ttl.
        """
        known = await self._store.operations.get(str(path))
        if known is None:
            return None
        try:
            copy = await self._checkpoints.find(str(path), field="source_path", caller=caller)
        except CheckpointNotFound:
            if known.settled_at is not None:  # an unsettled copy may still be in work
                await self._store.operations.delete(known.request_id)
            return None
        if known.path != str(source):
            raise AlreadyExists(f"model_seq_id: {path} is taken by another checkpoint, a copy of {known.path}")
        if known.fingerprint != _mark(ttl_seconds):
            raise _other_ttl(path, ttl_seconds)
        if known.settled_at is None:  # the gateway that ordered the copy did not index it; `find` above did
            await self._transfers.add(copy, known, owner=caller.owner)
        return copy

    async def _made_before(
        self, source: Checkpoint, path: TinkerPath, *, ttl_seconds: int | None, caller: Caller
    ) -> Checkpoint:
        """A copy that the trainer has already, and of which the database had no operation.

        Raises AlreadyExists when it is another version, or has another ttl.
        """
        found = await self._checkpoints.find(str(path), field="source_path", caller=caller)
        if found.version_id != source.version_id:
            raise AlreadyExists(f"model_seq_id: {path} is taken by another checkpoint")
        if ttl_seconds != (None if found.expires_at is None else round(found.expires_at - found.created_at)):
            raise _other_ttl(path, ttl_seconds)
        return found


def _mark(ttl_seconds: int | None) -> str:
    return fingerprint(COPY, str(ttl_seconds))


def _other_ttl(path: TinkerPath, ttl_seconds: int | None) -> AlreadyExists:
    return AlreadyExists(
        f"ttl_seconds: {path} was made with another value than {ttl_seconds}; a repeat (the same X-Idempotency-Key, or "
        "session_id and model_seq_id) must send the same value"
    )
