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
from collections.abc import Iterable
from typing import Any, Literal

from sqlalchemy import insert, update
from sqlalchemy.exc import SQLAlchemyError

from gateway.database.outages import log_failure
from gateway.database.sessions import Whose
from gateway.database.store import Store
from gateway.database.tables.history import Span
from gateway.database.tables.sessions import Model
from gateway.database.tables.tenants import AuditEvent, TokenCount, Usage
from gateway.tasks import to_its_end

logger = logging.getLogger(__name__)

FLUSH_S = 1.0

UsageKind = Literal[
    "training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "checkpoint", "storage"
]

TOKEN_KINDS = ("training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample")

_Used = tuple[int, Whose, str, str, str]
"""Hour, whose, session, base model, kind."""
_UNKNOWN = Whose("", "")


class Ledger:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._usage: Counter[_Used] = Counter()
        self._rows: list[AuditEvent | Span] = []
        self._touched: dict[str, float] = {}
        self._flushing = asyncio.Lock()
        self._counted: dict[Whose, int] = {}
        """Tokens that the database had when it was last written or read; they never get fewer."""
        self._gathered: Counter[Whose] = Counter()
        """Tokens that it does not have yet."""

    def use(
        self,
        kind: UsageKind,
        amount: int,
        *,
        base_model: str,
        session_id: str = "",
        owner: str | None = None,
        key_id: str = "",
        hour: int | None = None,
    ) -> None:
        """Counts tokens, checkpoints, or byte-hours. Owner and key are those of the session unless an owner is given;
        the hour, counted since 1970, is now."""
        if amount > 0:
            hour = int(time.time() // 3600) if hour is None else hour
            whose = (
                Whose(owner, key_id) if owner is not None else self._store.sessions.known_whose(session_id) or _UNKNOWN
            )
            self._usage[hour, whose, session_id, base_model, kind] += amount
            if kind in TOKEN_KINDS and whose != _UNKNOWN:
                self._gathered[whose] += amount

    def tokens(self, owner: str) -> int:
        """All that the owner has used, of every kind and at every gateway, as far as it is known here."""
        counts = (self._counted, self._gathered)
        return sum(amount for count in counts for whose, amount in count.items() if whose.owner == owner)

    def heard(self, rows: Iterable[TokenCount]) -> None:
        """What the database had a moment ago."""
        for row in rows:
            whose = Whose(row.owner, row.key_id)
            self._counted[whose] = max(self._counted.get(whose, 0), row.amount)

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
            except SQLAlchemyError as error:
                log_failure("the ledger cannot be written", error, by=logger)

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

    async def _write(self, usage: Counter[_Used], rows: list[AuditEvent | Span], touched: dict[str, float]) -> None:
        used: Counter[_Used] = Counter()
        tokens: Counter[Whose] = Counter()
        for (hour, known, session_id, base_model, kind), amount in usage.items():
            whose = known if known != _UNKNOWN else await self._store.sessions.whose(session_id) or _UNKNOWN
            used[hour, whose, session_id, base_model, kind] += amount
            if kind in TOKEN_KINDS:
                tokens[whose] += amount
        counted: dict[Whose, int] = {}
        async with self._store.begin() as db:
            # In one order for all gateways, so that none waits for another that waits for it.
            for (hour, whose, session_id, base_model, kind), amount in sorted(used.items()):
                statement = self._store.insert(Usage).values(
                    hour=hour,
                    owner=whose.owner,
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
            for whose, amount in sorted(tokens.items()):
                count = self._store.insert(TokenCount).values(owner=whose.owner, key_id=whose.key_id, amount=amount)
                summed = count.on_conflict_do_update(
                    index_elements=["owner", "key_id"], set_={"amount": TokenCount.amount + count.excluded.amount}
                )
                counted[whose] = (await db.scalars(summed.returning(TokenCount.amount))).one()
            for model_id, at in sorted(touched.items()):
                await db.execute(update(Model).where(Model.model_id == model_id).values(last_request_at=at))
            for kind in (AuditEvent, Span):
                if some := [_values(row) for row in rows if isinstance(row, kind)]:
                    await db.execute(insert(kind), some)  # not as objects: a thousand would hold up the event loop
        for whose, amount in counted.items():
            self._counted[whose] = max(self._counted.get(whose, 0), amount)
        for (_, whose, *_, kind), amount in usage.items():
            if kind in TOKEN_KINDS and whose != _UNKNOWN:
                self._gathered[whose] -= amount
                if not self._gathered[whose]:
                    del self._gathered[whose]


def _values(row: AuditEvent | Span) -> dict[str, Any]:
    """What the row holds, without the number that the database gives it."""
    return {column.name: getattr(row, column.name) for column in row.__table__.columns if not column.primary_key}
