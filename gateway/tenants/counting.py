"""Which training operations have been counted in the usage.

Who submits an operation counts its tokens when it is answered. When that gateway has died in between, another that sees
the answer counts them, or the same one after its restart: but not when they were counted before, which a row for each
operation tells. So it waits for longer than the rows of a living gateway may be on their way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from gateway.database.outages import log_failure
from gateway.database.store import Store
from gateway.database.tables.tenants import CountedOperation
from gateway.tasks import to_its_end
from gateway.tenants.ledger import FLUSH_S, Ledger

logger = logging.getLogger(__name__)

_PATIENCE_S = 5 * FLUSH_S
_PER_QUERY = 500
"""Rows in one statement: databases limit its parameters."""

_Key = tuple[str, int]
"""Model and seq_id."""


@dataclass(frozen=True, slots=True)
class _Unsure:
    key: _Key
    num_tokens: int
    base_model: str
    session_id: str
    seen_at: float


class Counting:
    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._counted: set[_Key] = set()
        self._unsure: dict[_Key, _Unsure] = {}
        self._writing = asyncio.Lock()

    def count(self, model_id: str, seq_id: int, num_tokens: int, *, base_model: str, session_id: str) -> None:
        """For who has submitted the operation."""
        self._ledger.use("training", num_tokens, base_model=base_model, session_id=session_id)
        self._counted.add((model_id, seq_id))

    def count_unless_counted(
        self, model_id: str, seq_id: int, num_tokens: int, *, base_model: str, session_id: str
    ) -> None:
        """For who has found the answer of what another process has submitted."""
        key = (model_id, seq_id)
        if num_tokens and key not in self._counted:
            self._unsure.setdefault(key, _Unsure(key, num_tokens, base_model, session_id, time.monotonic()))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await to_its_end(self.write(patience_s=_PATIENCE_S))
            except SQLAlchemyError as error:
                log_failure("counted operations cannot be written", error, by=logger)

    async def write_now(self) -> None:
        """What was counted, and the usage, as they are now: a kill afterwards loses nothing of it."""
        await self.write(patience_s=_PATIENCE_S)
        await self._ledger.flush()

    async def write(self, *, patience_s: float = 0.0) -> None:
        """Writes what was counted, and counts what nobody has for `patience_s`."""
        async with self._writing:
            counted = self._counted
            ripe = [each for each in self._unsure.values() if time.monotonic() >= each.seen_at + patience_s]
            if not counted and not ripe:
                return
            self._counted = set()
            try:
                await self._add(counted)
            except BaseException:
                self._counted |= counted
                raise
            new = await self._add({each.key for each in ripe})
            for each in ripe:
                del self._unsure[each.key]
                if each.key in new:
                    self._ledger.use(
                        "training", each.num_tokens, base_model=each.base_model, session_id=each.session_id
                    )

    async def _add(self, keys: set[_Key]) -> set[_Key]:
        """Those of them that were not there."""
        new: set[_Key] = set()
        ordered = sorted(keys)
        for start in range(0, len(ordered), _PER_QUERY):
            rows = [
                {"model_id": model_id, "seq_id": seq_id} for model_id, seq_id in ordered[start : start + _PER_QUERY]
            ]
            query = self._store.insert(CountedOperation).values(rows).on_conflict_do_nothing()
            returned = query.returning(CountedOperation.model_id, CountedOperation.seq_id)
            async with self._store.begin() as db:
                found: Any = await db.execute(returned)
                new.update((model_id, seq_id) for model_id, seq_id in found)
        return new
