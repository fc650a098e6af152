"""Usage and its cost, by hour. The operator sets the prices; nothing is ever charged."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from sqlalchemy import Text, case, cast, func, literal_column, select

from gateway.config import GatewayConfig, TokenKind
from gateway.database.catalog import exists_now, in_project
from gateway.database.connection import parts
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.sessions import Model, Session
from gateway.database.tables.tenants import HourlyUsage
from gateway.tenants.ledger import Ledger
from gateway.views import DEFAULT_PROJECT, Json, time_text, urn_of
from tinsmith.errors import InvalidRequest

GIGABYTE = 10**9
HOUR_S = 3600
HOURS_OF_MONTH = 720
"""Hours in a month, for the price of storage."""

MAX_EVENTS = 20_000
"""Most events in one answer, which is held in memory as a whole."""

MAX_METADATA = 4 * 2**20
"""Most characters of sessions' metadata in one answer."""
_PER_PASS = 200
"""Most events that are made, or sessions whose metadata is read, in one pass of the event loop."""
_EVENT = (
    HourlyUsage.hour,
    HourlyUsage.owner,
    HourlyUsage.session_id,
    HourlyUsage.base_model,
    HourlyUsage.kind,
    HourlyUsage.amount,
    Session.session_id.label("known"),
    Session.project_id,
)
"""Columns of an event, in the order of the arguments of `_event`. Tags and metadata of a session are not among them:
they may have 64 Ki characters each, and would be read for each event, and parsed on the event loop."""
_SIZES = select(Session.session_id, func.length(cast(Session.user_metadata, Text)))

_METERED_UNTIL = "storage_metered_until"


class Billing:
    """Meters storage, and lists usage with its cost."""

    def __init__(self, config: GatewayConfig, *, store: Store, ledger: Ledger) -> None:
        self._token_prices = config.token_prices_usd
        self.storage_price = config.storage_price_usd
        """USD per gigabyte and month."""
        self._store = store
        self._ledger = ledger

    # Storage

    async def meter_storage(self) -> None:
        """Counts the byte-hours since the last metering. Only one of the gateways behind the database does it.

        A checkpoint that was deleted in between counts up to the last metering.
        """
        now = time.time()
        last = await self._store.settings.get(_METERED_UNTIL, default=repr(now))
        if float(last) >= now or not await self._store.settings.swap(_METERED_UNTIL, old=last, new=repr(now)):
            return
        for hour, begin, end in hours_between(float(last), now):
            for owner, base_model, byte_seconds in await self._stored(begin, end):
                amount = round(byte_seconds / HOUR_S)
                self._ledger.use("storage", amount, base_model=base_model, owner=owner, hour=hour)

    async def _stored(self, begin: float, end: float) -> list[tuple[str, str, float]]:
        """Byte-seconds of stored checkpoints between two times in seconds since 1970: (owner, base model, amount)."""
        since = case((Checkpoint.created_at > begin, Checkpoint.created_at), else_=begin)
        until = case((Checkpoint.expires_at < end, Checkpoint.expires_at), else_=end)
        query = (
            select(Checkpoint.owner, Checkpoint.base_model, func.sum(Checkpoint.size_bytes * (until - since)))
            .where(until > since)
            .group_by(Checkpoint.owner, Checkpoint.base_model)
        )
        return [(owner, base_model, float(amount)) for owner, base_model, amount in await self._store.rows(query)]

    async def stored_now(self, project_id: str | None, *, owner: str | None) -> list[tuple[str, str, int, int]]:
        """Stored checkpoints: (project, owner, number, size in bytes). `project_id` None means all projects, and
        `owner` None all owners."""
        # The text is a literal, because PostgreSQL takes the parameters of SELECT and GROUP BY for two different
        # values.
        project = func.coalesce(Session.project_id, literal_column(f"'{DEFAULT_PROJECT}'"))
        query = (
            select(project, Checkpoint.owner, func.count(), func.sum(Checkpoint.size_bytes))
            .outerjoin(Model, Model.model_id == Checkpoint.run_id)
            .outerjoin(Session, Session.session_id == Model.session_id)
            .where(exists_now())
            .group_by(project, Checkpoint.owner)
            .order_by(project, Checkpoint.owner)
        )
        if project_id is not None:
            query = query.where(in_project(project_id))
        if owner is not None:
            query = query.where(Checkpoint.owner == owner)
        return [(found, owner, count, int(size)) for found, owner, count, size in await self._store.rows(query)]

    # Usage

    async def usage(
        self, begin_hour: int, end_hour: int, *, owner: str | None
    ) -> tuple[list[Json], dict[str, orjson.Fragment]]:
        """The usage events of a span of hours, and the user metadata of the sessions that these events name.

        Hours count from 1970; `end_hour` is not included. `owner` None means the events of all owners. The metadata has
        at most MAX_METADATA characters in all; the longest is left out. Raises InvalidRequest when the hours have more
        than MAX_EVENTS events.
        """
        await self._ledger.caught_up()
        query = (
            select(*_EVENT)
            .outerjoin(Session, Session.session_id == HourlyUsage.session_id)
            .where(HourlyUsage.hour >= begin_hour, HourlyUsage.hour < end_hour)
            .order_by(HourlyUsage.hour, HourlyUsage.amount.desc(), HourlyUsage.kind)
        )
        if owner is not None:
            query = query.where(HourlyUsage.owner == owner)
        rows = await self._store.rows(query.limit(MAX_EVENTS + 1))
        if len(rows) > MAX_EVENTS:
            raise InvalidRequest(
                f"ending_before: the {end_hour - begin_hour} hours have more than {MAX_EVENTS} events, which is the "
                "most of one answer; ask for fewer hours at a time",
                field="ending_before",
            )
        events = []
        for start in range(0, len(rows), _PER_PASS):
            events += [self._event(*row) for row in rows[start : start + _PER_PASS]]
            await asyncio.sleep(0)
        session_ids = list({row.session_id: None for row in rows if row.known is not None})
        return events, await self._metadata(session_ids)

    async def _metadata(self, session_ids: Sequence[str]) -> dict[str, orjson.Fragment]:
        """session_id -> user metadata as JSON. The longest are left out if all have more than MAX_METADATA characters.

        The text goes from the database into the answer as it is, because parsing it would block the event loop.
        """
        text = cast(Session.user_metadata, Text)
        sizes: list[tuple[int, str]] = []
        for some in parts(session_ids):
            rows = await self._store.rows(_SIZES.where(Session.session_id.in_(some)))
            sizes += [(size, found) for found, size in rows]
        sizes.sort()
        totals = itertools.accumulate(size for size, _ in sizes)
        kept = [found for (_, found), total in zip(sizes, totals, strict=True) if total <= MAX_METADATA]
        texts: dict[str, orjson.Fragment] = {}
        for start in range(0, len(kept), _PER_PASS):
            some = Session.session_id.in_(kept[start : start + _PER_PASS])
            for found, metadata in await self._store.rows(select(Session.session_id, text).where(some)):
                texts[found] = orjson.Fragment("null" if metadata == "{}" else metadata)
        return {session_id: texts[session_id] for session_id in session_ids if session_id in texts}

    def _event(
        self,
        hour: int,
        owner: str,
        session_id: str,
        base_model: str,
        kind: str,
        amount: int,
        known: str | None,
        project_id: str | None,
    ) -> Json:
        """An event as JSON. `known`: id of the session; None when the database has no such session."""
        bucket_start = hour * HOUR_S
        event: Json = {
            "bucket_start": time_text(bucket_start),
            "bucket_end": time_text(bucket_start + HOUR_S),
            "base_model": base_model or None,
            "user_id": urn_of(owner),
            "session_id": session_id or None,
            "project_id": None if known is None else project_id or DEFAULT_PROJECT,
        }
        match kind:
            case "storage":
                gigabyte_hours = amount / GIGABYTE
                # The field `free`, which would be false, is left out: SDKs before 0.33 refuse unknown fields.
                event["event_info"] = {"type": "storage", "gigabyte_hours": gigabyte_hours}
                event["effective_rate_usd_per_gigabyte_month"] = self.storage_price
                event["estimated_cost_usd"] = self.storage_price * gigabyte_hours / HOURS_OF_MONTH
            case "checkpoint":
                event["event_info"] = {"type": "checkpoint", "count": amount}
            case "training" | "sampling_prefill" | "sampling_prefill_cached" | "sampling_sample":
                rate = self._token_price(base_model, kind)
                event["event_info"] = _token_info(kind, amount)
                event["effective_rate_usd_per_million_tokens"] = rate
                event["estimated_cost_usd"] = rate * amount / 1e6
        return event

    def _token_price(self, base_model: str, kind: TokenKind) -> float:
        for name in (base_model, "*"):
            if kind in (prices := self._token_prices.get(name, {})):
                return prices[kind]
        return 0.0


def _token_info(kind: TokenKind, count: int) -> dict[str, Any]:
    if kind in ("sampling_prefill", "sampling_prefill_cached"):
        return {"type": "sampling_prefill", "cached": kind == "sampling_prefill_cached", "token_count": count}
    return {"type": kind, "token_count": count}


def hours_between(begin: float, end: float) -> Iterator[tuple[int, float, float]]:
    """Each hour since 1970 that the span touches, with the begin and end of their overlap in seconds."""
    for hour in range(int(begin // HOUR_S), int(end // HOUR_S) + 1):
        yield hour, max(begin, hour * HOUR_S), min(end, (hour + 1) * HOUR_S)
