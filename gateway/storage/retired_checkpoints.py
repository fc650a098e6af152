"""Files of deleted checkpoints that live samplers still need.

A sampler goes on when its checkpoint is deleted or expires. The trainer copies the files (as links, where the file
system has them) to a location without a public path. They are found there by the old location and the version, which
the sampling session stores. The copy is deleted when the last sampling session of that version has ended.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, exists, or_, select

from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint, RetiredCheckpoint
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.placement import Placement
from tinsmith.errors import CheckpointExists, CheckpointNotFound, ServiceError
from tinsmith.rpc.paths import RETIRED
from tinsmith.v1 import trainer_pb2

logger = logging.getLogger(__name__)


def _retired(location: str, version_id: str) -> str:
    """Location of the copy of a version that had this location. It depends on nothing else, so a retry after a crash
    reuses the first copy."""
    mark = hashlib.sha256(f"{location}\n{version_id}".encode()).hexdigest()[:32]
    return f"{RETIRED}/ephemeral/{mark}"


class RetiredCheckpoints:
    """Makes, finds and deletes the copies of deleted checkpoints."""

    def __init__(self, store: Store, placement: Placement) -> None:
        self._store = store
        self._placement = placement

    async def find(self, location: str, version_id: str) -> str | None:
        """Location of a version whose checkpoint was deleted; None when no sampler needed it at that time."""
        row = await self._store.get(RetiredCheckpoint, _retired(location, version_id))
        return None if row is None else row.location

    async def keep_for_samplers(self, checkpoint: Checkpoint) -> None:
        """Copies the files of a checkpoint if a live sampler uses them. Must be called before the files are deleted.

        Raises InvalidRequest when no trainer serves the base model, and NotReady when the trainer cannot be reached.
        """
        source, version_id = checkpoint.location, checkpoint.version_id
        async with self._store.begin() as db:
            if not await db.scalar(select(is_sampled(source, version_id))):
                return
        location = _retired(source, version_id)
        trainer = await self._placement.of_checkpoint(source, checkpoint.base_model)
        # A client that deletes the checkpoint and the reaper may both add this row.
        row = self._store.insert(RetiredCheckpoint).values(
            location=location,
            source=source,
            version_id=version_id,
            base_model=checkpoint.base_model,
            retired_at=time.time(),
        )
        # The row is added first, so that a gateway that is killed leaves no copy that nobody deletes. It is added again
        # after the copy: if the last session ended meanwhile, delete_unused may have deleted the row before the copy
        # was there.
        await self._add(row)
        try:
            await trainer.stub.CopyCheckpoint(trainer_pb2.CopyCheckpointRequest(source=source, destination=location))
        except CheckpointExists:
            pass
        except CheckpointNotFound:
            return  # the files are gone already
        await self._add(row)
        logger.info("%s was copied to %s, because samplers still use it", source, location)

    async def _add(self, row: Any) -> None:
        await self._store.run(row.on_conflict_do_nothing())

    async def delete_unused(self) -> None:
        """Deletes the copies that no live sampler uses any more."""
        unused = select(RetiredCheckpoint).where(~is_sampled(RetiredCheckpoint.source, RetiredCheckpoint.version_id))
        rows = await self._store.all(unused)
        for row in rows:
            try:
                trainer = await self._placement.of_checkpoint(row.source, row.base_model)
                await trainer.stub.DeleteCheckpoint(trainer_pb2.DeleteCheckpointRequest(location=row.location))
            except ServiceError as error:
                logger.warning("%s cannot be deleted now: %s", row.location, error.message)
                continue
            await self._store.run(delete(RetiredCheckpoint).where(RetiredCheckpoint.location == row.location))
            logger.info("%s was deleted: no sampler uses it any more", row.location)


def is_sampled(location: Any, version_id: Any) -> ColumnElement[bool]:
    """True when a live session has a sampler of this version, or a sampler that follows a run whose newest inflight
    version this is.

    `location`, `version_id`: values or columns.
    """
    samples = and_(SamplingSession.location == location, SamplingSession.version_id == version_id)
    follows = exists().where(
        Model.model_id == SamplingSession.inflight_run_id,
        Model.inflight_location == location,
        Model.inflight_version_id == version_id,
    )
    return exists().where(
        SamplingSession.session_id == Session.session_id, Session.ended_at.is_(None), or_(samples, follows)
    )
