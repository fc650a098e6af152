"""The audit log, usage and stored checkpoints, for operators."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import orjson
from sqlalchemy import Select, and_, or_, select
from starlette.responses import Response, StreamingResponse

from gateway import answers, schemas
from gateway.codec import Request
from gateway.database.store import Store
from gateway.database.tables.tenants import AuditEvent
from gateway.futures import JSON
from gateway.http.endpoint import GET
from gateway.tenants.billing import GIGABYTE, HOUR_S
from gateway.views import owner_of_urn, time_text, urn_of
from tinsmith.errors import InvalidRequest

MAX_USAGE_DAYS = 14
_PAGE_ROWS = 500
"""Entries of the audit log that are read at a time."""


def _entry(event: AuditEvent) -> answers.records.AuditEntry:
    entry: answers.records.AuditEntry = {
        "timestamp": time_text(event.at),
        "event": event.event,
        "event_details": {"actor": urn_of(event.owner), **event.details},
    }
    if event.category == "checkpoints":
        entry["model_id"] = event.details.get("training_run_id")
        entry["tinker_path"] = event.details.get("tinker_path")
        entry["purpose"] = event.details.get("purpose")
    return entry


async def audit(request: Request, query: schemas.AuditQuery) -> Response:
    """Audit log of a day.

    The entries are the caller's actions from midnight to midnight UTC; for an admin, all actions. The default is today.
    """
    day = query.day or datetime.now(UTC).date()
    begin = datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
    events = select(AuditEvent).where(AuditEvent.at >= begin, AuditEvent.at < begin + timedelta(days=1).total_seconds())
    if query.event_type != "all":
        events = events.where(AuditEvent.category == query.event_type)
    if (owner := request.caller.sees_only) is not None:
        events = events.where(AuditEvent.owner == owner)
    events = events.order_by(AuditEvent.at, AuditEvent.event_id).limit(_PAGE_ROWS)
    await request.gateway.ledger.caught_up()
    first = await request.gateway.store.all(events)
    return StreamingResponse(_entries(request.gateway.store, events, first), media_type=JSON)


async def _entries(store: Store, events: Select[AuditEvent], page: list[AuditEvent]) -> AsyncIterator[bytes]:
    """The audit log as JSON, made a page at a time, because a day may have a million entries. `page`: the first
    page."""
    yield b'{"entries":['
    comma = b""
    while page:
        yield comma + orjson.dumps([_entry(event) for event in page])[1:-1]
        if len(page) < _PAGE_ROWS:
            break
        comma, last = b",", page[-1]
        after = or_(AuditEvent.at > last.at, and_(AuditEvent.at == last.at, AuditEvent.event_id > last.event_id))
        page = await store.all(events.where(after))
    yield b"]}"


def _hour(at: datetime, *, field: str) -> int:
    """A time as hours since 1970. Raises InvalidRequest unless it is the beginning of an hour."""
    hour, rest = divmod(at.timestamp(), HOUR_S)
    if rest:
        raise InvalidRequest(f"{field}: {at.isoformat()} is not the beginning of an hour, UTC", field=field)
    return int(hour)


async def billing_usage(request: Request, query: schemas.UsageQuery) -> answers.records.UsageEvents:
    """Usage by hour.

    The sessions with the longest metadata may be left out of `sessions`.
    """
    gateway = request.gateway
    begin = _hour(query.starting_on, field="starting_on")
    end = _hour(query.ending_before, field="ending_before")
    if begin * HOUR_S > time.time():
        raise InvalidRequest(f"starting_on: {query.starting_on.isoformat()} is in the future", field="starting_on")
    if not begin < end <= begin + MAX_USAGE_DAYS * 24:
        raise InvalidRequest(
            f"ending_before: {query.ending_before.isoformat()} is not after starting_on, by at most "
            f"{MAX_USAGE_DAYS} days",
            field="ending_before",
        )
    billing, by_owner = gateway.tenants.billing, gateway.tenants.callers.by_owner
    events, sessions = await billing.usage(begin, end, owner=request.caller.sees_only)
    users = {urn: by_owner(owner_of_urn(urn)) for urn in {event["user_id"] for event in events}}
    for event in events:
        caller = users[event["user_id"]]
        event["user_name"] = caller.name if caller is not None else None
    return {
        "data": events,
        "sessions": {key: {"user_metadata": metadata} for key, metadata in sessions.items()},
        "cost_data_through": None,  # there are no invoices; every cost is an estimate by the operator's prices
    }


async def checkpoint_storage(request: Request, query: schemas.StorageQuery) -> answers.records.StorageFacts:
    """Stored checkpoints and their size."""
    gateway = request.gateway
    price = gateway.tenants.billing.storage_price
    data: list[answers.records.StorageRow] = []
    for project_id, owner, count, size in await gateway.tenants.billing.stored_now(
        query.project_id, owner=request.caller.sees_only
    ):
        caller = gateway.tenants.callers.by_owner(owner)
        data.append(
            {
                "project_id": project_id,
                "org_user_urn": urn_of(owner),
                "user_email": caller.email or None if caller is not None else None,
                "user_name": caller.name if caller is not None else None,
                "checkpoint_count": count,
                "size_bytes": size,
                "size_gigabytes": size / GIGABYTE,
                "estimated_monthly_cost_usd": price * size / GIGABYTE,
            }
        )
    return {"effective_rate_usd_per_gigabyte_month": price, "data": data}


routes = [
    GET("/audit", audit, errors=(400,), answers=answers.records.AuditLog),
    GET("/billing/usage/events", billing_usage, errors=(400,)),
    GET("/billing/usage/checkpoints/current", checkpoint_storage),
]
