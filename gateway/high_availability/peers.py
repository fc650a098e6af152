"""The gateways behind one database: which of them live, and which one does the work that only one may do.

Each gateway keeps a heartbeat row, and increments its number every second. A gateway that sees a number unchanged for
SILENT_S deletes the row. A gateway without a row is dead: other gateways take over its samples (forwarding.py),
leases and operations. A gateway that was only slow finds its row gone, and goes on like a new one. Clocks of different
machines are never compared.

A gateway without peer_url is the only one of its database. Such a gateway has no row, and sends no heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

from sqlalchemy import CursorResult, Select, delete, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from gateway.database.store import Store
from gateway.database.tables.gateways import GatewayRow, Lease
from gateway.futures import Futures
from tinsmith.tasks import to_its_end

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""Pause between two beats, in seconds."""
SILENT_S = 5.0
"""Time without a beat after which a gateway counts as dead, in seconds."""
FRESH_S = 3.0
"""Time after its last beat in which a gateway need not ask whether others have taken it for dead, in seconds."""
_ALONE_S = 0.02
"""Pause before a gateway asks again for a lease that another one has, in seconds."""


class OtherGateways(Exception):
    """Other gateways use the database, and this one has no peer_url."""


class GatewayPeers:
    """Beats for this gateway, watches the others, and takes leases."""

    def __init__(self, store: Store, futures: Futures, *, url: str) -> None:
        self.gateway_id = uuid4().hex
        self._store = store
        self._futures = futures
        self._url = url
        self._rows: dict[str, GatewayRow] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        """gateway_id -> number of the gateway, and the time at which this number was first seen, on the monotonic
        clock."""
        self._beaten_at = -SILENT_S
        self._beating = asyncio.Lock()
        """Held during a beat, and while a lease of `alone` is taken or given back."""
        self._left: set[str] = set()
        """Work whose block in `alone` has ended, and whose lease is still to be given back."""
        self.on_taken_for_dead: Callable[[], None] = lambda: None
        """Called when other gateways have taken this one for dead, and may have taken over its samples."""
        self.on_beat: Callable[[], Awaitable[None]] | None = None
        """Called after each beat."""

    @property
    def are_several(self) -> bool:
        """Whether there may be other gateways. This is so if this gateway has a peer_url."""
        return bool(self._url)

    @property
    def is_fresh(self) -> bool:
        """Whether the last beat is so recent that no other gateway can have taken this one for dead."""
        return time.monotonic() < self._beaten_at + FRESH_S

    def url_of(self, gateway_id: str) -> str | None:
        """The URL of a gateway; None when it is not known to live."""
        row = self._rows.get(gateway_id)
        return None if row is None else row.url

    def busy_models(self) -> set[str]:
        """Models with operations in work at other gateways."""
        others = (row for row in self._rows.values() if row.gateway_id != self.gateway_id)
        return {model_id for row in others for model_id in row.busy_models}

    async def start(self) -> None:
        """Makes this gateway's row. Raises OtherGateways when other gateways live and this one has no peer_url."""
        if self.are_several:
            async with self._store.begin() as db:
                # A row with this URL was left by an earlier gateway, which is gone.
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
            await self._store.run(delete(GatewayRow))

    async def _beats(self) -> dict[str, int]:
        return {row.url: row.beat for row in await self._store.all(select(GatewayRow))}

    async def stop(self) -> None:
        if self.are_several:
            await self._store.run(delete(GatewayRow).where(GatewayRow.gateway_id == self.gateway_id))

    async def run(self) -> None:
        while self.are_several:
            await asyncio.sleep(BEAT_S)
            try:
                await to_its_end(self.beat())
            except SQLAlchemyError:
                logger.exception("this gateway cannot tell the others that it lives; it tries again")

    async def refresh(self) -> None:
        """Beats unless `is_fresh`. Must be called before a decision that is right only while this gateway lives."""
        async with self._beating:
            if not self.is_fresh:
                await self._beat()

    async def beat(self) -> None:
        """Increments this gateway's number, and deletes rows of gateways that are silent. Raises SQLAlchemyError."""
        async with self._beating:
            await self._beat()
        await self._give_back()

    async def _beat(self) -> None:
        began = time.monotonic()
        if began - self._beaten_at > SILENT_S:  # in an outage of the database all gateways are silent; start anew
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
                    await db.execute(delete(Lease).where(Lease.holder == gateway_id))
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

    async def has_lease(self, work: str) -> bool:
        """Whether this gateway has the lease for this kind of work. Takes it if no living gateway has it."""
        if not self.are_several:
            return True
        is_free = or_(Lease.holder == self.gateway_id, Lease.holder.not_in(living()))
        statement = self._store.insert(Lease).values(name=work, holder=self.gateway_id)
        query = statement.on_conflict_do_update(
            index_elements=["name"], set_={"holder": self.gateway_id}, where=is_free
        ).returning(Lease.holder)
        return await self._store.first(query) is not None

    @asynccontextmanager
    async def alone(self, work: str) -> AsyncIterator[None]:
        """A context for work that only one gateway may do at a time. Blocks of one gateway do not exclude each other.

        A gateway that dies in its block holds up the others for SILENT_S.
        """
        if not self.are_several:
            yield
            return
        try:
            while not await self._takes(work):  # noqa: ASYNC110 - another gateway ends its block
                await asyncio.sleep(_ALONE_S)
            yield
        finally:  # also after an error: the lease may have been taken, and only the database's answer lost
            self._left.add(work)
            with suppress(SQLAlchemyError):  # the next beat gives it back
                await to_its_end(self._give_back())

    async def _takes(self, work: str) -> bool:
        async with self._beating:
            taken = await self.has_lease(work)
            self._left.discard(work)
            return taken

    async def _give_back(self) -> None:
        """Gives back the leases of blocks that have ended."""
        async with self._beating:
            if left := set(self._left):
                mine = Lease.holder == self.gateway_id
                await self._store.run(delete(Lease).where(Lease.name.in_(left), mine))
                self._left -= left


def living() -> Select[str]:
    """The ids of the living gateways, as a subquery."""
    return select(GatewayRow.gateway_id)


def _changed(result: Any) -> bool:
    assert isinstance(result, CursorResult)
    return result.rowcount > 0
