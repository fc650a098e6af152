"""What was used, what was done to checkpoints, how long work took, and when a run was last asked for something:
written behind, a batch at a time.

These rows are for reading later; nothing that a client waits for depends on them. A gateway that is killed loses at
most the last FLUSH_S seconds of them.

Several gateways may see the answer of one training operation: who submitted it, and those that were asked for it later.
Each counts its tokens, in the transaction that marks the operation as counted, and only the first mark counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import insert, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.outages import log_failure
from gateway.database.sessions import Whose
from gateway.database.store import Store
from gateway.database.tables.history import Span
from gateway.database.tables.sessions import Model
from gateway.database.tables.tenants import AuditEvent, CountedOperation, TokenCount, Usage

logger = logging.getLogger(__name__)

FLUSH_S = 1.0

UsageKind = Literal[
    "training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "checkpoint", "storage"
]

TOKEN_KINDS = ("training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample")

_Used = tuple[int, Whose, str, str, str]
"""Hour, whose, session, base model, kind."""
_UNKNOWN = Whose("", "")
_Operation = tuple[str, int]
"""Model and seq_id."""
_PER_QUERY = 500
"""Rows in one statement: databases limit its parameters."""


@dataclass(frozen=True, slots=True)
class _Trained:
    used: _Used
    num_tokens: int
    is_new: bool
    """Submitted here, so nobody has counted it, unless somebody else saw its answer a moment earlier."""


@dataclass(slots=True)
class _Gathered:
    """What is not in the database yet."""

    usage: Counter[_Used] = field(default_factory=Counter)
    trained: dict[_Operation, _Trained] = field(default_factory=dict)
    rows: list[AuditEvent | Span] = field(default_factory=list)
    touched: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.usage or self.trained or self.rows or self.touched)

    def follow(self, earlier: _Gathered) -> None:
        """Takes in what came before."""
        self.usage.update(earlier.usage)
        self.trained = self.trained | earlier.trained
        self.rows = earlier.rows + self.rows
        self.touched = earlier.touched | self.touched


class Ledger:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._gathered = _Gathered()
        self._flushing = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()
        self._counted: dict[Whose, int] = {}
        """Tokens that the database had when it was last written or read; they never get fewer."""
        self._unwritten: Counter[Whose] = Counter()
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
            whose = self._whose(session_id) if owner is None else Whose(owner, key_id)
            used = (_this_hour() if hour is None else hour, whose, session_id, base_model, kind)
            self._gathered.usage[used] += amount
            if kind in TOKEN_KINDS and whose != _UNKNOWN:
                self._unwritten[whose] += amount

    def train(
        self, model_id: str, seq_id: int, num_tokens: int, *, base_model: str, session_id: str, is_new: bool
    ) -> None:
        """Counts the tokens of a training operation once, however often and wherever this is called. `is_new`: it was
        submitted here."""
        operation, whose = (model_id, seq_id), self._whose(session_id)
        if num_tokens > 0 and operation not in self._gathered.trained:
            used = (_this_hour(), whose, session_id, base_model, "training")
            self._gathered.trained[operation] = _Trained(used, num_tokens, is_new)
            if is_new and whose != _UNKNOWN:
                self._unwritten[whose] += num_tokens

    def _whose(self, session_id: str) -> Whose:
        return self._store.sessions.known_whose(session_id) or _UNKNOWN

    def tokens(self, owner: str) -> int:
        """All that the owner has used, of every kind and at every gateway, as far as it is known here."""
        counts = (self._counted, self._unwritten)
        return sum(amount for count in counts for whose, amount in count.items() if whose.owner == owner)

    def heard(self, rows: Iterable[TokenCount]) -> None:
        """What the database had a moment ago."""
        for row in rows:
            whose = Whose(row.owner, row.key_id)
            self._counted[whose] = max(self._counted.get(whose, 0), row.amount)

    def touch(self, model_id: str) -> None:
        """The training run is asked for something now."""
        self._gathered.touched[model_id] = time.time()

    def audit(self, event: str, *, owner: str, category: str = "checkpoints", **details: Any) -> None:
        self._gathered.rows.append(
            AuditEvent(at=time.time(), owner=owner, category=category, event=event, details=details)
        )

    def span(self, span: Span) -> None:
        self._gathered.rows.append(span)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except SQLAlchemyError as error:
                log_failure("the ledger cannot be written", error, by=logger)

    async def flush(self) -> None:
        """Writes what has gathered; it stays gathered when that fails. Afterwards all of it can be read."""
        writing = asyncio.create_task(self._flush())
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        await asyncio.shield(writing)  # cut off, however slow it is, it would not know whether the database has it

    async def _flush(self) -> None:
        async with self._flushing:
            gathered, self._gathered = self._gathered, _Gathered()
            if not gathered:
                return
            try:
                await self._write(gathered)
            except BaseException:
                self._gathered.follow(gathered)
                raise

    async def _write(self, gathered: _Gathered) -> None:
        used: Counter[_Used] = Counter()
        for each, amount in gathered.usage.items():
            used[await self._with_owner(each)] += amount
        trained = {
            operation: (await self._with_owner(each.used), each.num_tokens)
            for operation, each in gathered.trained.items()
        }
        tokens: Counter[Whose] = Counter()
        counted: dict[Whose, int] = {}
        async with self._store.begin() as db:
            for operation in await self._mark(db, sorted(trained)):
                each, amount = trained[operation]
                used[each] += amount
            for (_, whose, _, _, kind), amount in used.items():
                if kind in TOKEN_KINDS:
                    tokens[whose] += amount
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
            for model_id, at in sorted(gathered.touched.items()):
                await db.execute(update(Model).where(Model.model_id == model_id).values(last_request_at=at))
            for kind in (AuditEvent, Span):
                if some := [_values(row) for row in gathered.rows if isinstance(row, kind)]:
                    await db.execute(insert(kind), some)  # not as objects: a thousand would hold up the event loop
        for whose, amount in counted.items():
            self._counted[whose] = max(self._counted.get(whose, 0), amount)
        known = [(whose, amount) for (_, whose, _, _, kind), amount in gathered.usage.items() if kind in TOKEN_KINDS]
        known += [(each.used[1], each.num_tokens) for each in gathered.trained.values() if each.is_new]
        for whose, amount in known:
            if whose != _UNKNOWN:
                self._unwritten[whose] -= amount
                if not self._unwritten[whose]:
                    del self._unwritten[whose]

    async def _with_owner(self, used: _Used) -> _Used:
        hour, whose, session_id, base_model, kind = used
        if whose == _UNKNOWN:
            whose = await self._store.sessions.whose(session_id) or _UNKNOWN
        return hour, whose, session_id, base_model, kind

    async def _mark(self, db: AsyncSession, operations: Sequence[_Operation]) -> list[_Operation]:
        """Those of them that had no mark."""
        new: list[_Operation] = []
        for start in range(0, len(operations), _PER_QUERY):
            rows = [{"model_id": model_id, "seq_id": seq_id} for model_id, seq_id in operations[start:][:_PER_QUERY]]
            query = self._store.insert(CountedOperation).values(rows).on_conflict_do_nothing()
            marked: Any = await db.execute(query.returning(CountedOperation.model_id, CountedOperation.seq_id))
            new += [(model_id, seq_id) for model_id, seq_id in marked]
        return new


def _this_hour() -> int:
    """Since 1970."""
    return int(time.time() // 3600)


def _values(row: AuditEvent | Span) -> dict[str, Any]:
    """What the row holds, without the number that the database gives it."""
    return {column.name: getattr(row, column.name) for column in row.__table__.columns if not column.primary_key}
