"""The gateways behind one database: which of them live, and what only one of them does at a time.

Each has a row, whose number it raises every second. Who sees that a number has not gone up for SILENT_S takes the row
away, and by that alone a gateway is dead: for samples (sampling/homes.py), leases and operations, whichever gateway
asks. One that was only slow finds its row gone, and goes on as a new one would. No clocks are compared.

A gateway without peer_url is the only one of its database. It has no row, and nothing here costs it anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from uuid import uuid4

from sqlalchemy import CursorResult, Select, delete, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from gateway.database.store import Store
from gateway.database.tables.gateways import GatewayRow, Lease
from gateway.futures import Futures
from gateway.tasks import to_its_end

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENT_S = 5.0
FRESH_S = 3.0
"""So long after its last beat a gateway knows, without asking, that nobody can have taken it for dead."""


class OtherGateways(Exception):
    """There are others, and this one was not told how they would reach it."""


class Peers:
    def __init__(self, store: Store, futures: Futures, *, url: str) -> None:
        self.gateway_id = uuid4().hex
        self._store = store
        self._futures = futures
        self._url = url
        self._rows: dict[str, GatewayRow] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        """The number of each of the others, and when it was first seen."""
        self._beaten_at = -SILENT_S
        self._beating = asyncio.Lock()
        self.on_taken_for_dead: Callable[[], None] = lambda: None
        """Told when others may have taken over what this gateway had."""
        self.on_beat: Callable[[], Awaitable[None]] | None = None

    @property
    def are_several(self) -> bool:
        """There are others, or there may be."""
        return bool(self._url)

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() < self._beaten_at + FRESH_S

    def url_of(self, gateway_id: str) -> str | None:
        """None for one that is not known to live."""
        row = self._rows.get(gateway_id)
        return None if row is None else row.url

    def busy_models(self) -> set[str]:
        """Models that others wait for the trainer for."""
        others = (row for row in self._rows.values() if row.gateway_id != self.gateway_id)
        return {model_id for row in others for model_id in row.busy_models}

    async def start(self) -> None:
        """Raises OtherGateways when this one is to be the only one, and is not."""
        if self.are_several:
            async with self._store.begin() as db:
                # Who had this address before does not have it any more.
                await db.execute(delete(GatewayRow).where(GatewayRow.url == self._url))
            await self.beat()
            return
        if beats := await self._beats():
            await asyncio.sleep(2 * BEAT_S)
            later = await self._beats()
            if alive := [url for url, beat in later.items() if beat != beats.get(url)]:
                raise OtherGateways(
                    f"other gateways work on this database: {', '.join(alive)}; set peer_url to the address under "
                    "which they reach this one"
                )
            async with self._store.begin() as db:
                await db.execute(delete(GatewayRow))

    async def _beats(self) -> dict[str, int]:
        async with self._store.begin() as db:
            return {row.url: row.beat for row in await db.scalars(select(GatewayRow))}

    async def stop(self) -> None:
        if self.are_several:
            async with self._store.begin() as db:
                await db.execute(delete(GatewayRow).where(GatewayRow.gateway_id == self.gateway_id))

    async def run(self) -> None:
        while self.are_several:
            await asyncio.sleep(BEAT_S)
            try:
                await to_its_end(self.beat())
            except SQLAlchemyError:
                logger.exception("the other gateways cannot be told that this one lives; it is tried again")

    async def refresh(self) -> None:
        """To be called before a decision that rests on this gateway's being alive: is_fresh from then on."""
        async with self._beating:
            if not self.is_fresh:
                await self._beat()

    async def beat(self) -> None:
        """Says that this gateway lives, and looks after the others."""
        async with self._beating:
            await self._beat()

    async def _beat(self) -> None:
        began = time.monotonic()
        if began - self._beaten_at > SILENT_S:  # the database may have been away, and the others as silent as this one
            self._seen.clear()
        mine = GatewayRow.gateway_id == self.gateway_id
        busy = self._futures.busy_models()
        async with self._store.begin() as db:
            raised = await db.execute(update(GatewayRow).where(mine).values(beat=GatewayRow.beat + 1, busy_models=busy))
            was_there = _changed(raised)
            if not was_there:
                db.add(GatewayRow(gateway_id=self.gateway_id, url=self._url, beat=0, busy_models=busy))
                await db.flush()
            rows = {row.gateway_id: row for row in await db.scalars(select(GatewayRow))}
        for gateway_id in list(self._silent(rows)):
            beat = rows[gateway_id].beat
            async with self._store.begin() as db:
                query = delete(GatewayRow).where(GatewayRow.gateway_id == gateway_id, GatewayRow.beat == beat)
                if _changed(await db.execute(query)):
                    logger.warning("the gateway at %s is gone", rows.pop(gateway_id).url)
        is_first = not self._rows
        self._rows, self._beaten_at = rows, began
        if not was_there and not is_first:
            logger.warning("other gateways took this one for dead: it was silent for more than %g s", SILENT_S)
            self.on_taken_for_dead()
        if self.on_beat is not None:
            await self.on_beat()

    def _silent(self, rows: dict[str, GatewayRow]) -> Iterator[str]:
        now = time.monotonic()
        self._seen = {gateway_id: seen for gateway_id, seen in self._seen.items() if gateway_id in rows}
        for row in rows.values():
            number, since = self._seen.get(row.gateway_id, (-1, now))
            if row.gateway_id == self.gateway_id or number != row.beat:
                self._seen[row.gateway_id] = (row.beat, now)
            elif now - since > SILENT_S:
                yield row.gateway_id

    async def leads(self, work: str) -> bool:
        """True for one of the gateways, until it is gone."""
        if not self.are_several:
            return True
        is_free = or_(Lease.holder == self.gateway_id, Lease.holder.not_in(living()))
        statement = self._store.insert(Lease).values(name=work, holder=self.gateway_id)
        query = statement.on_conflict_do_update(
            index_elements=["name"], set_={"holder": self.gateway_id}, where=is_free
        ).returning(Lease.holder)
        async with self._store.begin() as db:
            return (await db.scalars(query)).one_or_none() is not None


def living() -> Select[str]:
    """The ids of the gateways that live, as a subquery."""
    return select(GatewayRow.gateway_id)


def _changed(result: Any) -> bool:
    assert isinstance(result, CursorResult)
    return result.rowcount > 0
