"""Deletes rows that nobody needs any more, so that the database of a service that runs for years stays small.

Sessions, runs, checkpoints and usage stay, because users' history and bills are made of them.
"""

from __future__ import annotations

import time

from sqlalchemy import delete, exists, func, select

from gateway.config import GatewayConfig
from gateway.database.operations import TRANSFERS
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.history import Span
from gateway.database.tables.operations import CustomLoss, Operation
from gateway.database.tables.samples import SampleMark
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.database.tables.tenants import AuditEvent, CountedOperation, LedgerBatch

FORGET_S = 60.0
"""Pause between two rounds of deletion."""
_BATCH_S = 30 * 86400.0
"""How long the row of a ledger's newest batch is kept. No gateway sends a batch again after that long."""
_PER_QUERY = 500
"""Most ids in one query, because databases limit its parameters."""
_PER_TIME = 50_000
"""Most rows of a table with many rows that are deleted in one transaction, so that others can write in between."""


class Forgetting:
    def __init__(self, config: GatewayConfig, *, store: Store) -> None:
        self._config = config
        self._store = store
        self._due_at = 0.0

    async def forget_when_due(self) -> None:
        if time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + FORGET_S
            await self.forget()

    async def forget(self) -> None:
        now = time.time()
        await self._forget_spans(before=now - self._config.span_retention_s)
        async with self._store.begin() as db:
            await db.execute(delete(AuditEvent).where(AuditEvent.at < now - self._config.audit_retention_s))
            await db.execute(delete(LedgerBatch).where(LedgerBatch.written_at < now - _BATCH_S))
        await self._forget_ended(before=now - self._config.ended_session_retention_s)
        await self._forget_counted(before=now - FORGET_S)
        await self._forget_operations(before=now - FORGET_S)

    async def _forget_spans(self, *, before: float) -> None:
        async with self._store.begin() as db:
            await db.execute(delete(Span).where(Span.ended_at < before))
            # Ids of spans are consecutive, so the newest ones are found without counting a million rows.
            newest = await db.scalar(select(func.max(Span.span_id))) or 0
            await db.execute(delete(Span).where(Span.span_id <= newest - self._config.max_spans))

    async def _forget_ended(self, *, before: float) -> None:
        """Deletes samplers and custom losses of sessions that ended before this time."""
        samplers = select(SamplingSession.sampling_session_id).join(Session)
        losses = select(CustomLoss.loss_id).join(Session)
        async with self._store.begin() as db:
            old = samplers.where(SamplingSession.created_at < before, Session.ended_at < before)
            sampler_ids = list(await db.scalars(old.limit(_PER_TIME)))
            old = losses.where(CustomLoss.created_at < before, Session.ended_at < before)
            loss_ids = list(await db.scalars(old.limit(_PER_TIME)))
            for start in range(0, len(sampler_ids), _PER_QUERY):
                some = sampler_ids[start : start + _PER_QUERY]
                await db.execute(delete(SampleMark).where(SampleMark.sampling_session_id.in_(some)))
                await db.execute(delete(SamplingSession).where(SamplingSession.sampling_session_id.in_(some)))
            for start in range(0, len(loss_ids), _PER_QUERY):
                await db.execute(delete(CustomLoss).where(CustomLoss.loss_id.in_(loss_ids[start : start + _PER_QUERY])))

    async def _forget_counted(self, *, before: float) -> None:
        """Deletes marks of counted operations that a gateway wrote after the release of their model."""
        counted = select(CountedOperation.model_id).distinct().subquery()
        query = select(Model.model_id).join(counted, counted.c.model_id == Model.model_id)
        async with self._store.begin() as db:
            left = list(await db.scalars(query.where(Model.released_at < before)))
            for start in range(0, len(left), _PER_QUERY):
                some = CountedOperation.model_id.in_(left[start : start + _PER_QUERY])
                await db.execute(delete(CountedOperation).where(some))

    async def _forget_operations(self, *, before: float) -> None:
        """Deletes operations whose copy or import is gone, and those that were written after their model's release."""
        there = exists().where(Checkpoint.path == Operation.request_id)
        released = exists().where(Model.model_id == Operation.model_id, Model.released_at < before)
        is_transfer = Operation.kind.in_(TRANSFERS)
        async with self._store.begin() as db:
            await db.execute(delete(Operation).where(is_transfer, Operation.settled_at < before, ~there))
            await db.execute(delete(Operation).where(~is_transfer, Operation.error.is_(None), released))
