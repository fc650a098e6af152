"""A session's requests on a timeline, in Chrome's JSON trace format, which Perfetto (ui.perfetto.dev) reads.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Each service is a process of the trace, and each model or sampling session a thread. Slices of one thread must not
overlap unless one lies inside the other, so requests that overlap go to further threads of the same name. A slice lasts
from submission to answer. Inside it lies a slice of the service's computation, if that time is known.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
from sqlalchemy import and_, or_, select

from gateway.database.store import Store
from gateway.database.tables.history import Span
from gateway.database.tables.sessions import Session
from gateway.ids import is_model, is_of_sampler

_PAGE_ROWS = 1000
_SERVICES = {"gateway": 1, "trainer": 2, "sampler": 3}
"""Process number of each service."""

Event = dict[str, Any]


def service_of(track: str) -> str:
    """The service that works for a model, a sampling session or a session, by its id."""
    if is_of_sampler(track):
        return "sampler"
    return "trainer" if is_model(track) else "gateway"


class _Threads:
    """Numbers of threads. A track has as many threads as it has requests that overlap."""

    def __init__(self) -> None:
        self._count = 0
        self._free: dict[str, list[tuple[float, int]]] = {}
        """track -> heap of its threads: (time at which the thread is free, its number)."""

    def take(self, track: str, *, begin: float, end: float) -> tuple[int, str | None]:
        """A thread of the track that is free at `begin`, and its name if it is new. Calls must be ordered by
        `begin`."""
        threads = self._free.setdefault(track, [])
        if threads and threads[0][0] <= begin:
            _, number = heapq.heapreplace(threads, (end, threads[0][1]))
            return number, None
        self._count += 1
        heapq.heappush(threads, (end, self._count))
        return self._count, track if len(threads) == 1 else f"{track} ({len(threads)})"


def _microseconds(at: float) -> int:
    return round(at * 1e6)


def _slice(name: str, begin: float, end: float, *, category: str, **args: Any) -> Event:
    start = _microseconds(begin)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start,
        "dur": max(_microseconds(end) - start, 0),
        "args": args,
    }


def _name(what: str, name: str, **ids: int) -> Event:
    return {"ph": "M", "name": what, "args": {"name": name}, **ids}


def events(span: Span, threads: _Threads) -> Iterator[Event]:
    """The trace events of one span."""
    place: Event = {"pid": _SERVICES[service_of(span.track)]}
    number, name = threads.take(span.track, begin=span.submitted_at, end=span.ended_at)
    place["tid"] = number
    if name is not None:
        yield _name("thread_name", name, **place)
    args = {"request_id": span.request_id, "outcome": span.outcome, "num_tokens": span.num_tokens}
    yield _slice(span.name, span.submitted_at, span.ended_at, category="request", **args) | place
    if span.started_at is not None and span.computed_at is not None:
        begin = max(span.started_at, span.submitted_at)  # the clocks of two machines may differ
        end = min(span.computed_at, span.ended_at)
        if begin <= end:
            yield _slice("compute", begin, end, category="compute", request_id=span.request_id) | place


async def spans(store: Store, session_id: str) -> AsyncIterator[Span]:
    """The spans of a session in the order of submission, read a page at a time."""
    query = select(Span).where(Span.session_id == session_id).order_by(Span.submitted_at, Span.span_id)
    after: Span | None = None
    while True:
        page = query.limit(_PAGE_ROWS)
        if after is not None:
            same = and_(Span.submitted_at == after.submitted_at, Span.span_id > after.span_id)
            page = page.where(or_(Span.submitted_at > after.submitted_at, same))
        rows = await store.all(page)
        for row in rows:
            yield row
        if len(rows) < _PAGE_ROWS:
            return
        after = rows[-1]


async def trace(store: Store, session: Session) -> AsyncIterator[bytes]:
    """The trace file, in pieces."""
    about = {"session_id": session.session_id, "display_name": session.display_name or ""}
    yield b'{"displayTimeUnit":"ms","otherData":' + orjson.dumps(about) + b',"traceEvents":['
    names = [_name("process_name", service, pid=pid) for service, pid in _SERVICES.items()]
    yield b",".join(map(orjson.dumps, names))
    threads = _Threads()
    async for span in spans(store, session.session_id):
        yield b"".join(b"," + orjson.dumps(event) for event in events(span, threads))
    yield b"]}"
