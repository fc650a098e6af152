"""What was used, what was done to checkpoints, how long work took, and when a run was last asked for something:
written behind, a batch at a time.

These rows are for reading later; nothing that a client waits for depends on them. A gateway that is killed loses at
most the last FLUSH_S seconds of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any, Literal

from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from gateway.store import Store
from gateway.tables import AuditEvent, Model, Session, Span, Usage
from gateway.tasks import to_its_end

logger = logging.getLogger(__name__)

FLUSH_S = 1.0

UsageKind = Literal[
    "training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "checkpoint", "storage"
]


class Ledger:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._usage: Counter[tuple[int, str, str, str, str]] = Counter()
        self._rows: list[AuditEvent | Span] = []
        self._touched: dict[str, float] = {}
        self._owners: dict[str, str] = {}
        self._flushing = asyncio.Lock()

    def use(
        self,
        kind: UsageKind,
        amount: int,
        *,
        base_model: str,
        session_id: str = "",
        owner: str | None = None,
        hour: int | None = None,
    ) -> None:
        """Counts tokens, checkpoints, or byte-hours. The owner is that of the session unless one is given; the hour,
        counted since 1970, is now."""
        if amount > 0:
            hour = int(time.time() // 3600) if hour is None else hour
            self._usage[hour, owner or "", session_id, base_model, kind] += amount

    def touch(self, model_id: str) -> None:
        """The training run is asked for something now."""
        self._touched[model_id] = time.time()

    def audit(self, event: str, *, owner: str, category: str = "checkpoints", **details: Any) -> None:
        self._rows.append(AuditEvent(at=time.time(), owner=owner, category=category, event=event, details=details))

    def span(self, span: Span) -> None:
        self._rows.append(span)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await to_its_end(self.flush())
            except SQLAlchemyError:
                logger.exception("the ledger cannot be written; it is tried again")

    async def flush(self) -> None:
        """Writes what has gathered; it stays gathered when that fails. Afterwards all of it can be read."""
        async with self._flushing:
            usage, rows, touched = self._usage, self._rows, self._touched
            if not usage and not rows and not touched:
                return
            self._usage, self._rows, self._touched = Counter(), [], {}
            try:
                await self._write(usage, rows, touched)
            except BaseException:
                self._usage.update(usage)
                self._rows = rows + self._rows
                self._touched = touched | self._touched
                raise

    async def _write(
        self,
        usage: Counter[tuple[int, str, str, str, str]],
        rows: list[AuditEvent | Span],
        touched: dict[str, float],
    ) -> None:
        insert = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[self._store.dialect]
        async with self._store.begin() as db:
            wanted = {key[2] for key in usage if not key[1]} - set(self._owners)
            if wanted:
                found = await db.execute(
                    select(Session.session_id, Session.owner).where(Session.session_id.in_(wanted))
                )
                self._owners.update((session_id, owner) for session_id, owner in found)
            for (hour, owner, session_id, base_model, kind), amount in usage.items():
                statement = insert(Usage).values(
                    hour=hour,
                    owner=owner or self._owners.get(session_id, ""),
                    session_id=session_id,
                    base_model=base_model,
                    kind=kind,
                    amount=amount,
                )
                await db.execute(
                    statement.on_conflict_do_update(
                        index_elements=["hour", "owner", "session_id", "base_model", "kind"],
                        set_={"amount": Usage.amount + statement.excluded.amount},
                    )
                )
            for model_id, at in touched.items():
                await db.execute(update(Model).where(Model.model_id == model_id).values(last_request_at=at))
            db.add_all(rows)
