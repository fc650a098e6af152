"""The ledger writes usage, audit events, spans of work and times of the last request, in batches, in the background.

No client waits for these rows (write_behind.py). An event that changes a checkpoint is an exception: it is written in
the transaction of the change.

Each batch is written exactly once. A lost connection leaves open whether the database has the batch, so the batch is
sent again; its number, which is written in the same transaction, tells a batch that the database has already.

Several gateways may see the answer of one training operation: the gateway that submitted it, and gateways that were
asked for it later. Each adds the tokens in a transaction that also marks the operation as counted. Only the first mark
counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args
from uuid import uuid4

from sqlalchemy import Table, bindparam, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.config import TokenKind
from gateway.database.connection import parts
from gateway.database.sessions import SessionOwner
from gateway.database.store import Store
from gateway.database.tables.history import Span
from gateway.database.tables.sessions import Model
from gateway.database.tables.tenants import AuditEvent, CountedOperation, HourlyUsage, LedgerBatch, TokenCount
from gateway.database.write_behind import WriteBehind
from tinsmith.errors import NotReady

UsageKind = TokenKind | Literal["storage"]

TOKEN_KINDS = get_args(TokenKind)

_Used = tuple[int, SessionOwner, str, str, str]
"""Key of a sum of usage: hour since 1970, owner and key, session_id, base model, kind."""
_UNKNOWN = SessionOwner("", "")
_Operation = tuple[str, int]
"""model_id and seq_id."""
_MAX_SPANS = 50_000
"""Most spans that wait while the database cannot be written. Further ones are dropped."""
_MAX_TRAINED = 50_000
"""Most training operations whose usage waits for the database. Beyond that, `check_room` refuses new ones, so that no
usage is lost."""
PER_STATEMENT = 1000
"""Most rows that one statement writes. Other work of the event loop runs between two statements."""
_USAGE, _COUNTS = cast(Table, HourlyUsage.__table__), cast(Table, TokenCount.__table__)
_COUNTED, _MODELS = cast(Table, CountedOperation.__table__), cast(Table, Model.__table__)
"""Tables instead of mapped classes. SQLAlchemy sends an UPDATE or INSERT ... ON CONFLICT with a list of rows to a table
in one statement, but to a mapped class one row at a time."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """The usage of one training operation."""

    used: _Used
    num_tokens: int
    is_new: bool
    """True if this gateway submitted the operation, so that most likely no gateway has counted it yet."""


@dataclass(slots=True)
class _Gathered:
    """Rows that are not in the database yet."""

    usage: Counter[_Used] = field(default_factory=Counter)
    trained: dict[_Operation, _Trained] = field(default_factory=dict)
    events: list[AuditEvent] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    """Columns of `Span`. Each request has a span, and an object of a mapped class would cost more than a dictionary."""
    touched: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.usage or self.trained or self.events or self.spans or self.touched)


class Ledger:
    """Gathers rows, writes them in batches, and knows the token counts of owners."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.behind = WriteBehind(self._write, what="the ledger")
        self._ledger_id = uuid4().hex
        self._gathered = _Gathered()
        self._batch = _Gathered()
        """The batch that is being written, or whose writing failed."""
        self._number = 0
        """Number of `_batch`."""
        self._counted: dict[SessionOwner, int] = {}
        """Tokens that the database had when it was last written or read. These counts only grow."""
        self._unwritten: Counter[SessionOwner] = Counter()
        """Tokens that are not in the database yet."""

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
        """Counts tokens or byte-hours. Owner and key are those of the session unless `owner` is given.

        `hour`: hours since 1970; None means the present hour.
        """
        if amount > 0:
            whose = self._whose(session_id) if owner is None else SessionOwner(owner, key_id)
            used = (_this_hour() if hour is None else hour, whose, session_id, base_model, kind)
            self._gathered.usage[used] += amount
            if kind in TOKEN_KINDS and whose != _UNKNOWN:
                self._unwritten[whose] += amount

    def train(
        self, model_id: str, seq_id: int, num_tokens: int, *, base_model: str, session_id: str, is_new: bool
    ) -> None:
        """Counts the tokens of a training operation. They count once, even if several gateways count them.

        `is_new`: True if this gateway submitted the operation.
        """
        operation, whose = (model_id, seq_id), self._whose(session_id)
        if num_tokens > 0 and operation not in self._gathered.trained:
            used = (_this_hour(), whose, session_id, base_model, "training")
            self._gathered.trained[operation] = _Trained(used, num_tokens, is_new)
            if is_new and whose != _UNKNOWN:
                self._unwritten[whose] += num_tokens

    def _whose(self, session_id: str) -> SessionOwner:
        return self._store.sessions.known_whose(session_id) or _UNKNOWN

    def owner_of(self, session_id: str) -> str:
        """The owner of a session; empty unless it is in memory."""
        return self._whose(session_id).owner

    def tokens(self, owner: str) -> int:
        """All tokens that the owner has used, of every kind and at every gateway, as far as this gateway knows.

        The number may be too high for a moment: between a commit and its confirmation, `heard` may have read tokens
        from the database that are still in `_unwritten`.
        """
        return self.written(owner) + _of(owner, self._unwritten)

    def written(self, owner: str) -> int:
        """The owner's tokens in the database, as far as this gateway knows; never too high."""
        return _of(owner, self._counted)

    def heard(self, rows: Iterable[TokenCount]) -> None:
        """Takes over token counts that were just read from the database."""
        for row in rows:
            whose = SessionOwner(row.owner, row.key_id)
            self._counted[whose] = max(self._counted.get(whose, 0), row.amount)

    def touch(self, model_id: str) -> None:
        """Notes that a client has sent a request for the training run now."""
        self._gathered.touched[model_id] = time.time()

    def touched_at(self, model_id: str) -> float | None:
        """Time of the run's last request if it is not in the database yet, in seconds since 1970; else None."""
        return self._gathered.touched.get(model_id) or self._batch.touched.get(model_id)

    def audit(self, event: str, *, owner: str, category: str = "checkpoints", **details: Any) -> None:
        self.add(audit_event(event, owner=owner, category=category, **details))

    def add(self, event: AuditEvent) -> None:
        self._gathered.events.append(event)

    def span(self, **columns: Any) -> None:
        """Adds a finished piece of work. `columns`: those of `Span`."""
        if len(self._gathered.spans) >= _MAX_SPANS:
            self._store.dropped_rows.labels(kind="span").inc()
        else:
            self._gathered.spans.append(columns)

    def check_room(self) -> None:
        """Raises NotReady when the usage of `_MAX_TRAINED` training operations waits for the database."""
        num_waiting = len(self._gathered.trained) + len(self._batch.trained)
        if num_waiting >= _MAX_TRAINED:
            raise NotReady(
                f"the usage of {num_waiting} training operations waits for the gateway's database, which cannot be "
                "written at the moment; try again"
            )

    async def count_checkpoint(self, db: AsyncSession, *, base_model: str, session_id: str, owner: str) -> None:
        """Counts one checkpoint in the transaction of the caller."""
        await self._count(
            db, Counter({(_this_hour(), SessionOwner(owner, ""), session_id, base_model, "checkpoint"): 1})
        )

    async def flush(self) -> None:
        """Writes the gathered rows to the database. Raises SQLAlchemyError, and keeps the rows, when that fails."""
        await self.behind.flush()

    async def caught_up(self) -> None:
        """Waits until the rows that were added before are in the database, or could not be written; about a second at
        most.

        Requests that read the ledger wait like this. They do not write the rows themselves, because SQLite has one
        writer, and anyone may repeat a GET.
        """
        if self._gathered or self._batch:
            await self.behind.next_write()

    async def _write(self) -> None:
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
        known = Counter[SessionOwner]()
        """The share of `_unwritten` that is in this batch."""
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
                await _add_rows(db, batch)
                # The counts come last, because other gateways that count for these owners wait from here to the commit.
                counted = await self._count(db, usage)
            else:
                counted = await _counts(db, known)
        for whose, amount in counted.items():
            self._counted[whose] = max(self._counted.get(whose, 0), amount)
        self._unwritten -= known  # also drops the entries at 0
        self._batch = _Gathered()

    async def _is_new(self, db: AsyncSession) -> bool:
        """Writes the number of the batch. Returns False when the database has the batch already.

        The transaction of an earlier attempt may still be open, although its connection is lost. The statement then
        waits until that transaction has ended.
        """
        row = {"number": self._number, "written_at": time.time()}
        note = self._store.insert(LedgerBatch).values(ledger_id=self._ledger_id, **row)
        is_later = LedgerBatch.number < note.excluded.number
        noted = note.on_conflict_do_update(index_elements=["ledger_id"], set_=row, where=is_later)
        return (await db.scalars(noted.returning(LedgerBatch.number))).one_or_none() is not None

    async def _count(self, db: AsyncSession, usage: Counter[_Used]) -> dict[SessionOwner, int]:
        """Adds usage to the hours and to the token counts. Returns the new token counts."""
        if not usage:
            return {}
        # The rows are sorted, so that all gateways lock them in one order, without a deadlock.
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
        tokens: Counter[SessionOwner] = Counter()
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
        return {SessionOwner(owner, key_id): amount for owner, key_id, amount in returned}

    async def _with_owner(self, used: _Used) -> _Used:
        hour, whose, session_id, base_model, kind = used
        if whose == _UNKNOWN:
            whose = await self._store.sessions.whose(session_id) or _UNKNOWN
        return hour, whose, session_id, base_model, kind

    async def _mark(self, db: AsyncSession, operations: Sequence[_Operation]) -> list[_Operation]:
        """Marks operations as counted. Returns the operations that had no mark."""
        if not operations:
            return []
        rows = [{"model_id": model_id, "seq_id": seq_id} for model_id, seq_id in operations]
        query = self._store.insert(_COUNTED).on_conflict_do_nothing()
        marked: Any = await db.execute(query.returning(_COUNTED.c.model_id, _COUNTED.c.seq_id), rows)
        return [(model_id, seq_id) for model_id, seq_id in marked]


def audit_event(event: str, *, owner: str, category: str = "checkpoints", **details: Any) -> AuditEvent:
    """An audit event with the present time."""
    return AuditEvent(at=time.time(), owner=owner, category=category, event=event, details=details)


async def _add_rows(db: AsyncSession, batch: _Gathered) -> None:
    if batch.touched:
        touch = update(_MODELS).where(_MODELS.c.model_id == bindparam("id")).values(last_request_at=bindparam("at"))
        await db.execute(touch, [{"id": model_id, "at": at} for model_id, at in sorted(batch.touched.items())])
    for kind, rows in ((AuditEvent, [_values(event) for event in batch.events]), (Span, batch.spans)):
        # Rows are written as values, a part at a time. After an outage, making objects of all of them at once would
        # block the event loop for seconds.
        for start in range(0, len(rows), PER_STATEMENT):
            await db.execute(insert(kind), rows[start : start + PER_STATEMENT])


async def _counts(db: AsyncSession, whose: Iterable[SessionOwner]) -> dict[SessionOwner, int]:
    """The token counts that the database has for these owners."""
    owners = sorted({each.owner for each in whose})
    counted: dict[SessionOwner, int] = {}
    for some in parts(owners):
        rows = await db.scalars(select(TokenCount).where(TokenCount.owner.in_(some)))
        counted |= {SessionOwner(row.owner, row.key_id): row.amount for row in rows}
    return counted


def _of(owner: str, counts: Mapping[SessionOwner, int]) -> int:
    return sum(amount for whose, amount in counts.items() if whose.owner == owner)


def _this_hour() -> int:
    """Hours since 1970."""
    return int(time.time() // 3600)


def _values(row: AuditEvent) -> dict[str, Any]:
    """The columns of the row, without the key that the database assigns."""
    return {column.name: getattr(row, column.name) for column in row.__table__.columns if not column.primary_key}
