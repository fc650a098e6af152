"""Checkpoints that no save has made: copies and imports, each in a training run of its own that cannot be trained.

Each is written down before the trainer makes it. So what a gateway leaves that ends, or loses its database, between the
trainer's answer and the checkpoint's row is found, and indexed as if it had gone on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncSession

from gateway.convert import checkpoint_row
from gateway.database.operations import ARRIVALS, IMPORT
from gateway.database.outages import is_outage
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.operations import Operation
from gateway.database.tables.sessions import Model
from gateway.database.tables.tenants import AuditEvent
from gateway.storage.checkpoints import Checkpoints, event_of
from tinsmith.rpc.errors import NotReady, ServiceError
from tinsmith.rpc.paths import TinkerPath

logger = logging.getLogger(__name__)

_PATIENCE_S = 3600.0
"""How long a trainer may still be making what a gateway has left."""


class Arrivals:
    def __init__(self, store: Store, checkpoints: Checkpoints, *, gateway_id: str) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._gateway_id = gateway_id
        self._in_work: Counter[str] = Counter()

    def operation(self, kind: str, path: TinkerPath, *, source: str | None = None, mark: str = "") -> Operation:
        """`source`: the path that is copied. `mark`: of the request, to tell a repeat."""
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
        """While the block has a trainer make it. What fails for good leaves no note."""
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
            self._in_work += Counter()  # without those at 0

    async def add(self, row: Checkpoint, operation: Operation, *, owner: str) -> bool:
        """The trainer has it: it is indexed, if a search has not done so, and goes into the audit log as made by
        `owner`. False when that was done before."""
        await self._add_run(row)
        await self._store.checkpoints.put(row)

        async def note(db: AsyncSession) -> None:
            db.add(_event(row, operation, owner=owner))

        return await self._store.operations.settle(operation.request_id, note=note)

    async def _add_run(self, checkpoint: Checkpoint) -> None:
        """The trainer never has it, so it is released from its beginning."""
        now = time.time()
        await self._store.models.add(
            Model(
                model_id=checkpoint.run_id,
                session_id=checkpoint.run_id.rpartition(":train:")[0],
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
        """Indexes what gateways that are gone, or this one, have left in the trainers."""
        in_work = list(self._in_work)
        for operation in await self._store.operations.left(self._gateway_id, kinds=ARRIVALS, in_work=in_work):
            try:
                await self._finish(operation)
            except ServiceError as error:
                logger.warning("what became of %s cannot be found out now: %s", operation.request_id, error.message)

    async def _finish(self, operation: Operation) -> None:
        path = TinkerPath.parse(operation.request_id, field="path")
        session_id = path.run_id.partition(":")[0]
        whose = await self._store.sessions.whose(session_id)
        found = await self._store.checkpoints.get(str(path))
        if found is None and whose is not None and (info := await self._checkpoints.ask_trainers(path)) is not None:
            found = checkpoint_row(info, owner=whose.owner)
        if found is None:
            if time.time() - operation.created_at > _PATIENCE_S:
                await self._store.operations.delete(operation.request_id)
            return
        if await self.add(found, operation, owner=found.owner):
            logger.info("%s was left by a gateway that ended, or had no database, and is indexed", path)
        if operation.kind == IMPORT:
            await self._store.sessions.end(session_id, reason="success", detail=None)


def _event(row: Checkpoint, operation: Operation, *, owner: str) -> AuditEvent:
    if operation.kind == IMPORT:
        return event_of("checkpoint_import", row, owner=owner)
    source = TinkerPath.parse(str(operation.path), field="source_path")
    copied = Checkpoint(path=str(source), run_id=source.run_id)
    return event_of("checkpoint_copy", copied, owner=owner, copy=row.path)
