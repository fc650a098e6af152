"""Copies and imports: checkpoints that no save made, each in a training run of its own that cannot be trained.

The gateway stores an operation before the trainer makes the checkpoint. A gateway may die, or lose its database,
between the trainer's answer and the checkpoint's row. Then another gateway, or the same one later, finds the operation
and indexes the checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncSession

from gateway.convert import checkpoint_row
from gateway.database.operations import IMPORT, TRANSFERS
from gateway.database.outages import is_outage
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.operations import Operation
from gateway.database.tables.sessions import Model
from gateway.database.tables.tenants import AuditEvent
from gateway.ids import session_of
from gateway.storage.checkpoints import Checkpoints, event_of
from tinsmith.errors import NotReady, ServiceError
from tinsmith.rpc.paths import TinkerPath

logger = logging.getLogger(__name__)

_PATIENCE_S = 3600.0
"""Longest time for which a trainer may go on making a checkpoint whose gateway is gone, in seconds."""


class Transfers:
    """Indexes copied and imported checkpoints, also those that a dead gateway has left without a row."""

    def __init__(self, store: Store, checkpoints: Checkpoints, *, gateway_id: str) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._gateway_id = gateway_id
        self._in_work: Counter[str] = Counter()

    def operation(self, kind: str, path: TinkerPath, *, source: str | None = None, mark: str = "") -> Operation:
        """The operation that makes the checkpoint at `path`.

        `source`: the path that is copied. `mark`: fingerprint of the request, by which a repeat is known.
        """
        return Operation(
            request_id=str(path),
            model_id=path.run_id,
            kind=kind,
            path=source,
            fingerprint=mark,
            created_at=time.time(),
            gateway_id=self._gateway_id,
        )

    @asynccontextmanager
    async def noted(self, operation: Operation) -> AsyncIterator[None]:
        """A context in which a trainer makes the checkpoint. The operation is stored before, and is deleted when the
        block fails for good."""
        path = operation.request_id
        self._in_work[path] += 1
        try:
            is_mine = await self._store.operations.add(operation)
            try:
                yield
            except Exception as error:
                if is_mine and not isinstance(error, NotReady) and not is_outage(error):
                    await self._store.operations.delete(path)
                raise
        finally:
            self._in_work[path] -= 1
            self._in_work += Counter()  # drops the entries at 0

    async def add(self, row: Checkpoint, operation: Operation, *, owner: str) -> bool:
        """Indexes a checkpoint that the trainer has made, and writes it into the audit log as made by `owner`.

        Returns False when the checkpoint was in the audit log before.
        """
        await self._add_run(row)
        await self._store.checkpoints.put(row)

        async def note(db: AsyncSession) -> None:
            db.add(_event(row, operation, owner=owner))

        return await self._store.operations.settle(operation.request_id, note=note)

    async def _add_run(self, checkpoint: Checkpoint) -> None:
        """Adds the run of the checkpoint. It is released from its beginning, because no trainer ever has its model."""
        now = time.time()
        await self._store.models.add(
            Model(
                model_id=checkpoint.run_id,
                session_id=session_of(checkpoint.run_id),
                base_model=checkpoint.base_model,
                optimizer=checkpoint.optimizer,
                lora_rank=checkpoint.lora_rank,
                train_unembed=checkpoint.train_unembed,
                train_mlp=checkpoint.train_mlp,
                train_attn=checkpoint.train_attn,
                user_metadata={},
                created_at=now,
                released_at=now,
            )
        )

    async def finish_left(self) -> None:
        """Indexes the checkpoints that trainers have made for dead gateways, or for this one, and that were not
        indexed."""
        in_work = list(self._in_work)
        for operation in await self._store.operations.left(self._gateway_id, kinds=TRANSFERS, in_work=in_work):
            try:
                await self._finish(operation)
            except ServiceError as error:
                logger.warning("cannot find out now whether %s was made: %s", operation.request_id, error.message)

    async def _finish(self, operation: Operation) -> None:
        path = TinkerPath.parse(operation.request_id, field="path")
        session_id = session_of(path.run_id)
        whose = await self._store.sessions.whose(session_id)
        found = await self._store.checkpoints.get(str(path))
        if found is None and whose is not None and (info := await self._checkpoints.ask_trainers(path)) is not None:
            found = checkpoint_row(info, owner=whose.owner)
        if found is None:
            if time.time() - operation.created_at > _PATIENCE_S:
                await self._store.operations.delete(operation.request_id)
            return
        if await self.add(found, operation, owner=found.owner):
            logger.info("%s is now indexed: the gateway that ordered it has ended, or had no database", path)
        if operation.kind == IMPORT:
            await self._store.sessions.end(session_id, reason="success", detail=None)


def _event(row: Checkpoint, operation: Operation, *, owner: str) -> AuditEvent:
    if operation.kind == IMPORT:
        return event_of("checkpoint_import", row, owner=owner)
    source = TinkerPath.parse(str(operation.path), field="source_path")
    copied = Checkpoint(path=str(source), run_id=source.run_id)
    return event_of("checkpoint_copy", copied, owner=owner, copy=row.path)
