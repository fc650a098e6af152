"""What was used, what was done to checkpoints, how long work took, and when a run was last asked for something:
written behind, a batch at a time.

These rows are for reading later; nothing that a client waits for depends on them. A gateway that is killed loses at
most the last FLUSH_S seconds of them. What is done to a checkpoint is recorded in the transaction that does it.

Each batch is written once. Its number is in the same transaction: when a connection is lost, or a write cut off, nobody
knows whether the database has it, and the same batch, sent again, finds its own number.

Several gateways may see the answer of one training operation: who submitted it, and those that were asked for it later.
Each counts its tokens, in the transaction that marks the operation as counted, and only the first mark counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from uuid import uuid4

from sqlalchemy import Table, bindparam, insert, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.outages import log_failure
from gateway.database.sessions import Whose
from gateway.database.store import Store
from gateway.database.tables.history import Span
from gateway.database.tables.sessions import Model
from gateway.database.tables.tenants import AuditEvent, CountedOperation, LedgerBatch, TokenCount, Usage
from gateway.tasks import to_its_end
from tinsmith.rpc.errors import NotReady

logger = logging.getLogger(__name__)

FLUSH_S = 1.0

UsageKind = Literal["training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "storage"]

TOKEN_KINDS = ("training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample")

_Used = tuple[int, Whose, str, str, str]
"""Hour, whose, session, base model, kind."""
_UNKNOWN = Whose("", "")
_Operation = tuple[str, int]
"""Model and seq_id."""
_MAX_ROWS = 50_000
"""Spans and audit events that may wait for a database that cannot be written; further spans are dropped."""
_MAX_TRAINED = 50_000
"""Training operations whose tokens may wait for it; further ones are not accepted, so that none goes unbilled."""
PER_STATEMENT = 1000
"""Most rows that one statement writes. The event loop goes on between two statements."""
_PER_QUERY = 500
"""Owners in one query: databases limit its parameters."""
_USAGE, _COUNTS = cast(Table, Usage.__table__), cast(Table, TokenCount.__table__)
_COUNTED, _MODELS = cast(Table, CountedOperation.__table__), cast(Table, Model.__table__)
"""A batch changes many rows of each table in one statement. SQLAlchemy sends a list of rows to a table at once; to a
mapped class it would send an UPDATE or INSERT ... ON CONFLICT one row at a time."""


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


class Ledger:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._ledger_id = uuid4().hex
        self._gathered = _Gathered()
        self._batch = _Gathered()
        """What is being written, or was when it failed."""
        self._number = 0
        """Of the batch."""
        self._flushing = asyncio.Lock()
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
        """Counts tokens or byte-hours. Owner and key are those of the session unless an owner is given;
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

    def owner_of(self, session_id: str) -> str:
        """Empty where it is not known without asking the database."""
        return self._whose(session_id).owner

    def tokens(self, owner: str) -> int:
        """All that the owner has used, of every kind and at every gateway, as far as it is known here. For a moment it
        may be more: the database has, and `heard` of, what this ledger does not know to be written."""
        return self.written(owner) + _of(owner, self._unwritten)

    def written(self, owner: str) -> int:
        """Those that the database has, as far as it is known here: never more."""
        return _of(owner, self._counted)

    def heard(self, rows: Iterable[TokenCount]) -> None:
        """What the database had a moment ago."""
        for row in rows:
            whose = Whose(row.owner, row.key_id)
            self._counted[whose] = max(self._counted.get(whose, 0), row.amount)

    def touch(self, model_id: str) -> None:
        """The training run is asked for something now."""
        self._gathered.touched[model_id] = time.time()

    def touched_at(self, model_id: str) -> float | None:
        """When the run was asked for something, if that is not in the database yet."""
        return self._gathered.touched.get(model_id) or self._batch.touched.get(model_id)

    def audit(self, event: str, *, owner: str, category: str = "checkpoints", **details: Any) -> None:
        self.add(audit_event(event, owner=owner, category=category, **details))

    def add(self, row: AuditEvent | Span) -> None:
        if isinstance(row, Span) and len(self._gathered.rows) >= _MAX_ROWS:
            self._store.dropped_rows.labels(kind="span").inc()
        else:
            self._gathered.rows.append(row)

    def check_room(self) -> None:
        """Raises NotReady when so much usage waits for the database that no more may be made."""
        num_waiting = len(self._gathered.trained) + len(self._batch.trained)
        if num_waiting >= _MAX_TRAINED:
            raise NotReady(
                f"the usage of {num_waiting} training operations waits for the gateway's database, which cannot be "
                "written at the moment; try again"
            )

    async def count_checkpoint(self, db: AsyncSession, *, base_model: str, session_id: str, owner: str) -> None:
        """One more, in a transaction of the caller's: with it or not at all."""
        await self._count(db, Counter({(_this_hour(), Whose(owner, ""), session_id, base_model, "checkpoint"): 1}))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except SQLAlchemyError as error:
                log_failure("the ledger cannot be written", error, by=logger)

    async def flush(self) -> None:
        """Writes what has gathered; it is kept when that fails. Afterwards all of it can be read."""
        await to_its_end(self._flush())

    async def _flush(self) -> None:
        async with self._flushing:
            if self._batch:
                await self._write_batch()
            if self._gathered:
                self._batch, self._gathered = self._gathered, _Gathered()
                self._number += 1
                await self._write_batch()

    async def _write_batch(self) -> None:
        batch = self._batch
        usage: Counter[_Used] = Counter()
        for used, amount in batch.usage.items():
            usage[await self._with_owner(used)] += amount
        trained = {
            operation: (await self._with_owner(each.used), each.num_tokens) for operation, each in batch.trained.items()
        }
        known = Counter[Whose]()
        """What counts in `tokens` until it is written."""
        for (_, whose, _, _, kind), amount in batch.usage.items():
            if kind in TOKEN_KINDS and whose != _UNKNOWN:
                known[whose] += amount
        for each in batch.trained.values():
            if each.is_new and each.used[1] != _UNKNOWN:
                known[each.used[1]] += each.num_tokens
        async with self._store.begin() as db:
            if await self._is_new(db):
                for operation in await self._mark(db, sorted(trained)):
                    used, amount = trained[operation]
                    usage[used] += amount
                counted = await self._count(db, usage)
                await _add_rows(db, batch)
            else:
                counted = await _counts(db, known)
        for whose, amount in counted.items():
            self._counted[whose] = max(self._counted.get(whose, 0), amount)
        self._unwritten -= known  # what is zero by that goes
        self._batch = _Gathered()

    async def _is_new(self, db: AsyncSession) -> bool:
        """False when the database has the batch. Who wrote it and lost its connection may still be at it: then this
        waits for the end."""
        row = {"number": self._number, "written_at": time.time()}
        note = self._store.insert(LedgerBatch).values(ledger_id=self._ledger_id, **row)
        is_later = LedgerBatch.number < note.excluded.number
        noted = note.on_conflict_do_update(index_elements=["ledger_id"], set_=row, where=is_later)
        return (await db.scalars(noted.returning(LedgerBatch.number))).one_or_none() is not None

    async def _count(self, db: AsyncSession, usage: Counter[_Used]) -> dict[Whose, int]:
        """Adds it to the hours, and to the tokens of whom it belongs to: how many these are now."""
        if not usage:
            return {}
        # In one order for all gateways, so that none waits for another that waits for it.
        rows = [
            {
                "hour": hour,
                "owner": whose.owner,
                "session_id": session_id,
                "base_model": base_model,
                "kind": kind,
                "amount": amount,
            }
            for (hour, whose, session_id, base_model, kind), amount in sorted(usage.items())
        ]
        adding = self._store.insert(_USAGE)
        added = adding.on_conflict_do_update(
            index_elements=["hour", "owner", "session_id", "base_model", "kind"],
            set_={"amount": _USAGE.c.amount + adding.excluded.amount},
        )
        await db.execute(added, rows)
        tokens: Counter[Whose] = Counter()
        for (_, whose, _, _, kind), amount in usage.items():
            if kind in TOKEN_KINDS:
                tokens[whose] += amount
        if not tokens:
            return {}
        counts = [whose._asdict() | {"amount": amount} for whose, amount in sorted(tokens.items())]
        adding = self._store.insert(_COUNTS)
        summed = adding.on_conflict_do_update(
            index_elements=["owner", "key_id"], set_={"amount": _COUNTS.c.amount + adding.excluded.amount}
        )
        returned: Any = await db.execute(summed.returning(_COUNTS.c.owner, _COUNTS.c.key_id, _COUNTS.c.amount), counts)
        return {Whose(owner, key_id): amount for owner, key_id, amount in returned}

    async def _with_owner(self, used: _Used) -> _Used:
        hour, whose, session_id, base_model, kind = used
        if whose == _UNKNOWN:
            whose = await self._store.sessions.whose(session_id) or _UNKNOWN
        return hour, whose, session_id, base_model, kind

    async def _mark(self, db: AsyncSession, operations: Sequence[_Operation]) -> list[_Operation]:
        """Those of them that had no mark."""
        if not operations:
            return []
        rows = [{"model_id": model_id, "seq_id": seq_id} for model_id, seq_id in operations]
        query = self._store.insert(_COUNTED).on_conflict_do_nothing()
        marked: Any = await db.execute(query.returning(_COUNTED.c.model_id, _COUNTED.c.seq_id), rows)
        return [(model_id, seq_id) for model_id, seq_id in marked]


def audit_event(event: str, *, owner: str, category: str = "checkpoints", **details: Any) -> AuditEvent:
    """As of now."""
    return AuditEvent(at=time.time(), owner=owner, category=category, event=event, details=details)


async def _add_rows(db: AsyncSession, batch: _Gathered) -> None:
    if batch.touched:
        touch = update(_MODELS).where(_MODELS.c.model_id == bindparam("id")).values(last_request_at=bindparam("at"))
        await db.execute(touch, [{"id": model_id, "at": at} for model_id, at in sorted(batch.touched.items())])
    for kind in (AuditEvent, Span):
        rows = [row for row in batch.rows if isinstance(row, kind)]
        for start in range(0, len(rows), PER_STATEMENT):
            # Not as objects, and not all at once: after an outage they would hold up the event loop for seconds.
            await db.execute(insert(kind), [_values(row) for row in rows[start : start + PER_STATEMENT]])


async def _counts(db: AsyncSession, whose: Iterable[Whose]) -> dict[Whose, int]:
    """The tokens that the database has."""
    owners = sorted({each.owner for each in whose})
    counted: dict[Whose, int] = {}
    for start in range(0, len(owners), _PER_QUERY):
        rows = await db.scalars(select(TokenCount).where(TokenCount.owner.in_(owners[start:][:_PER_QUERY])))
        counted |= {Whose(row.owner, row.key_id): row.amount for row in rows}
    return counted


def _of(owner: str, counts: Mapping[Whose, int]) -> int:
    return sum(amount for whose, amount in counts.items() if whose.owner == owner)


def _this_hour() -> int:
    """Since 1970."""
    return int(time.time() // 3600)


def _values(row: AuditEvent | Span) -> dict[str, Any]:
    """What the row holds, without the number that the database gives it."""
    return {column.name: getattr(row, column.name) for column in row.__table__.columns if not column.primary_key}
