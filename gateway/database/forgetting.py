"""Deletes rows that nobody needs any more, so that the database of a service that runs for years stays small.

Checkpoints and amounts of usage stay. Each owner keeps a bounded number of sessions, runs, clients that sample and
entries of the audit log, and a bounded number of bytes of recorded sequences.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, delete, exists, func, literal, or_, select, tuple_

from gateway.config import GatewayConfig
from gateway.database.connection import parts
from gateway.database.operations import TRANSFERS
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint, RetentionPolicy
from gateway.database.tables.history import Span
from gateway.database.tables.operations import CustomLoss, Operation
from gateway.database.tables.samples import SampleMark, SequenceRecord
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.database.tables.tenants import AuditEvent, CountedOperation, HourlyUsage, LedgerBatch
from gateway.ids import session_of

FORGET_S = 60.0
"""Pause between two rounds of deletion, in seconds."""
BOUND_S = 600.0
"""Pause between two counts of the rows of each owner, which read whole tables, in seconds."""
_ROW_BYTES = 256
"""Bytes that count for the ids and the index of a recorded sequence, besides its prompt, tokens and logprobs; a lower
bound."""
_CREATION_S = 3600.0
"""Time after which a run that no trainer has made counts as ended, in seconds. It was refused, or its trainer is
away."""
_BATCH_S = 30 * 86400.0
"""Time for which the row of a ledger's newest batch is kept, in seconds. No gateway writes a batch again after that
time."""
_PER_TIME = 50_000
"""Most rows of one table that are deleted in one transaction, so that other transactions can write in between."""


class Forgetting:
    def __init__(self, config: GatewayConfig, *, store: Store) -> None:
        self._config = config
        self._store = store
        self._due_at = self._bound_due_at = 0.0

    async def forget_when_due(self) -> None:
        if time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + FORGET_S
            await self.forget()
        if time.monotonic() >= self._bound_due_at:
            self._bound_due_at = time.monotonic() + BOUND_S
            await self.bound_owners()

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
        """Deletes sampling sessions and custom losses of sessions that ended before this time."""
        samplers = select(SamplingSession.sampling_session_id).join(Session)
        losses = select(CustomLoss.loss_id).join(Session)
        async with self._store.begin() as db:
            old = samplers.where(SamplingSession.created_at < before, Session.ended_at < before)
            sampler_ids = list(await db.scalars(old.limit(_PER_TIME)))
            old = losses.where(CustomLoss.created_at < before, Session.ended_at < before)
            loss_ids = list(await db.scalars(old.limit(_PER_TIME)))
            for some in parts(sampler_ids):
                await db.execute(delete(SampleMark).where(SampleMark.sampling_session_id.in_(some)))
                await db.execute(delete(SamplingSession).where(SamplingSession.sampling_session_id.in_(some)))
            for some in parts(loss_ids):
                await db.execute(delete(CustomLoss).where(CustomLoss.loss_id.in_(some)))

    async def _forget_counted(self, *, before: float) -> None:
        """Deletes marks of counted operations that a gateway wrote after the release of their model."""
        counted = select(CountedOperation.model_id).distinct().subquery()
        query = select(Model.model_id).join(counted, counted.c.model_id == Model.model_id)
        async with self._store.begin() as db:
            left = list(await db.scalars(query.where(Model.released_at < before)))
            for some in parts(left):
                await db.execute(delete(CountedOperation).where(CountedOperation.model_id.in_(some)))

    async def _forget_operations(self, *, before: float) -> None:
        """Deletes settled copies and imports whose checkpoint is gone, and operations that a gateway wrote after the
        release of their model."""
        there = exists().where(Checkpoint.path == Operation.request_id)
        released = exists().where(Model.model_id == Operation.model_id, Model.released_at < before)
        is_transfer = Operation.kind.in_(TRANSFERS)
        async with self._store.begin() as db:
            await db.execute(delete(Operation).where(is_transfer, Operation.settled_at < before, ~there))
            await db.execute(delete(Operation).where(~is_transfer, Operation.error.is_(None), released))

    # The rows of each owner

    async def bound_owners(self) -> None:
        """Leaves each owner the newest `max_owner_rows` rows of each kind that nothing else bounds."""
        for owner in await self._above(select(AuditEvent.owner)):
            await self._forget_audit(owner)
        runs = _ended_runs(before=time.time() - _CREATION_S)
        for owner in await self._above(select(Session.owner).join(Model).where(runs)):
            await self._forget_runs(owner, runs)
        sessions = _ended_sessions()
        for owner in await self._above(select(Session.owner).where(sessions)):
            await self._forget_sessions(owner, sessions)
        for owner in await self._above(select(HourlyUsage.owner).where(HourlyUsage.session_id != "")):
            await self._sum_usage(owner)
        samplers = select(Session.owner).join(SamplingSession)
        for owner in await self._above(samplers.join(SampleMark, _is_of_sampler())):
            await self._forget_marks(owner)
        await self._forget_records()

    async def _above(self, owners: Select[str]) -> list[str]:
        """The owners whom the query has more than max_owner_rows times."""
        (owner,) = owners.selected_columns
        return await self._store.all(owners.group_by(owner).having(func.count() > self._config.max_owner_rows))

    async def _forget_audit(self, owner: str) -> None:
        newest = select(AuditEvent.event_id).where(AuditEvent.owner == owner).order_by(AuditEvent.event_id.desc())
        last = await self._store.first(newest.offset(self._config.max_owner_rows).limit(1))
        if last is not None:
            await self._store.run(delete(AuditEvent).where(AuditEvent.owner == owner, AuditEvent.event_id <= last))

    async def _forget_runs(self, owner: str, ended: ColumnElement[bool]) -> None:
        newest = select(Model.model_id).join(Session).where(Session.owner == owner, ended)
        newest = newest.order_by(Model.created_at.desc(), Model.model_id.desc())
        run_ids = await self._store.all(newest.offset(self._config.max_owner_rows).limit(_PER_TIME))
        for some in parts(run_ids):
            async with self._store.begin() as db:
                for table in (Operation, CountedOperation, Model):
                    await db.execute(delete(table).where(table.model_id.in_(some)))
                await db.execute(delete(RetentionPolicy).where(RetentionPolicy.run_id.in_(some)))

    async def _forget_sessions(self, owner: str, ended: ColumnElement[bool]) -> None:
        """Forgets the owner's oldest ended sessions, except sessions whose runs have checkpoints. The ids of these
        sessions come from the checkpoints, because a copy, and a checkpoint of a run that was made without a gateway,
        may have no row of a run."""
        of_checkpoints = select(Checkpoint.run_id).where(Checkpoint.owner == owner).distinct()
        needed = {session_of(run_id) for run_id in await self._store.all(of_checkpoints)}
        newest = select(Session.session_id).where(Session.owner == owner, ended)
        newest = newest.order_by(Session.ended_at.desc(), Session.session_id.desc())
        found = await self._store.all(newest.offset(self._config.max_owner_rows).limit(_PER_TIME + len(needed)))
        for some in parts([session_id for session_id in found if session_id not in needed]):
            await self._store.run(delete(Session).where(Session.session_id.in_(some), ended))

    async def _forget_marks(self, owner: str) -> None:
        """Forgets the progress of clients of the owner's oldest sampling sessions; within one sampling session, of the
        clients with the smallest numbers. If a gateway is started again while a sample of such a client is in work, the
        client is not told to send the sample again."""
        key = SampleMark.sampling_session_id, SampleMark.clone_id
        newest = select(*key).join(SamplingSession, _is_of_sampler()).join(Session).where(Session.owner == owner)
        newest = newest.order_by(SamplingSession.created_at.desc(), *(column.desc() for column in key))
        async with self._store.begin() as db:
            query = newest.offset(self._config.max_owner_rows).limit(_PER_TIME)
            found = [(sampling_session_id, clone_id) for sampling_session_id, clone_id in await db.execute(query)]
            for some in parts(found):
                await db.execute(delete(SampleMark).where(tuple_(*key).in_(some)))

    async def _forget_records(self) -> None:
        """Leaves each owner max_owner_record_bytes of recorded sequences: the sequences that were used last."""
        columns = SequenceRecord.prompt, SequenceRecord.tokens, SequenceRecord.logprobs
        size = sum((func.length(column) for column in columns), start=literal(_ROW_BYTES))
        limit = self._config.max_owner_record_bytes
        is_of_session = SequenceRecord.session_id == Session.session_id
        owners = select(Session.owner).join(SequenceRecord, is_of_session).group_by(Session.owner)
        for owner in await self._store.all(owners.having(func.sum(size) > limit)):
            newest = SequenceRecord.expires_at.desc(), SequenceRecord.sequence_id
            mine = select(SequenceRecord.sequence_id, func.sum(size).over(order_by=newest).label("total"))
            ranked = mine.join(Session, is_of_session).where(Session.owner == owner).subquery()
            ids = await self._store.all(select(ranked.c.sequence_id).where(ranked.c.total > limit).limit(_PER_TIME))
            for some in parts(ids):
                await self._store.run(delete(SequenceRecord).where(SequenceRecord.sequence_id.in_(some)))

    async def _sum_usage(self, owner: str) -> None:
        """Sums up the usage of the owner's oldest hours over sessions, so that at most max_owner_rows of the owner's
        rows name a session."""
        mine = HourlyUsage.owner == owner, HourlyUsage.session_id != ""
        newest = select(HourlyUsage.hour).where(*mine).order_by(HourlyUsage.hour.desc())
        last = await self._store.first(newest.offset(self._config.max_owner_rows).limit(1))
        if last is None:
            return
        hours = select(HourlyUsage.hour).where(*mine, HourlyUsage.hour <= last).distinct().order_by(HourlyUsage.hour)
        for hour in await self._store.all(hours):
            async with self._store.begin() as db:
                # The amounts come from the deleted rows themselves, because another gateway may have raised them since
                # they were last read.
                removed = delete(HourlyUsage).where(*mine, HourlyUsage.hour == hour)
                amounts = Counter[tuple[str, str]]()
                rows: Any = await db.execute(
                    removed.returning(HourlyUsage.base_model, HourlyUsage.kind, HourlyUsage.amount)
                )
                for base_model, kind, amount in rows:
                    amounts[base_model, kind] += amount
                for (base_model, kind), amount in sorted(amounts.items()):
                    row = {"hour": hour, "owner": owner, "session_id": "", "base_model": base_model, "kind": kind}
                    adding = self._store.insert(HourlyUsage).values(**row, amount=amount)
                    summed = {"amount": HourlyUsage.amount + adding.excluded.amount}
                    await db.execute(adding.on_conflict_do_update(index_elements=list(row), set_=summed))


def _ended_runs(*, before: float) -> ColumnElement[bool]:
    """True for a run without checkpoints that no sampling session follows, if its trainer has freed it, or if no
    trainer has made it although its row was added before this time."""
    return and_(
        or_(Model.released_at.is_not(None), and_(Model.lora_rank.is_(None), Model.created_at < before)),
        ~exists().where(Checkpoint.run_id == Model.model_id),
        ~exists().where(SamplingSession.inflight_run_id == Model.model_id),
    )


def _ended_sessions() -> ColumnElement[bool]:
    """True for an ended session without any run, sampling session, custom loss or recorded sequence."""
    tables = Model, SamplingSession, CustomLoss, SequenceRecord
    of_it = (exists().where(table.session_id == Session.session_id) for table in tables)
    return and_(Session.ended_at.is_not(None), *(~any_left for any_left in of_it))


def _is_of_sampler() -> ColumnElement[bool]:
    return SampleMark.sampling_session_id == SamplingSession.sampling_session_id
