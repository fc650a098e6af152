"""The dashboard's lists: runs with their newest metrics, sessions, checkpoints."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache
from sqlalchemy import Text, cast, func, or_, select
from sqlalchemy.orm import defer

from gateway.clients import Clients
from gateway.dashboard.history import HistorySummary, MetricHistory
from gateway.database.catalog import exists_now
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.futures import Futures
from gateway.views import DEFAULT_PROJECT, Json
from tinsmith.errors import NotFound
from tinsmith.rpc.paths import KINDS

MAX_RUNS = 100
"""Most runs in a list, the newest ones. Older runs that are active are listed in addition."""
MAX_SESSIONS = 200
"""Most sessions in a list, the newest ones."""
MAX_CHECKPOINTS = 500
"""Most checkpoints of a run in a list, the newest ones."""
_FRESH_S = 1.5
"""Time within which a list or a history is not read again, in seconds."""
_SETTLED_S = 120.0
"""Time after its last request after which the metrics of a run with nothing in work are final, in seconds."""
_MAX_KEPT = 4 * MAX_RUNS
"""Most runs whose last reading is kept in memory."""
_ACTIVE_S = 20.0
"""Time after its last request for which a run is listed, however old the run is, in seconds."""
_MAX_SHARED = 256
"""Most lists that are kept in memory."""
_SHOWN = 500
"""Most characters of a client's text that a list shows; the text may have 64 Ki."""
_NO_NOTES = (defer(Session.user_metadata), defer(Session.tags), defer(Session.end_detail))
"""Columns that lists do not load: they may be long, and parsing their JSON would block the event loop."""
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True, slots=True)
class _Reading:
    """The newest part of a run's history, as it was read at some time."""

    at: float
    newest: int
    """seq_id of the run's newest point; 0 when there is none."""
    summary: HistorySummary | None


@dataclass(frozen=True, slots=True)
class _SharedList:
    """A list that is read once for all tabs of an owner."""

    begun_at: float
    read: asyncio.Task[Any]


class Lists:
    """Reads the lists."""

    def __init__(self, store: Store, *, history: MetricHistory, futures: Futures, clients: Clients) -> None:
        self._store = store
        self._history = history
        self._futures = futures
        self._clients = clients
        self._reads: LRUCache[str, _Reading] = LRUCache(_MAX_KEPT)
        """run_id -> the last reading."""
        self._shared: LRUCache[tuple[str, str | None], _SharedList] = LRUCache(_MAX_SHARED)
        """Name of a list and owner -> the list. Owner None means the list of all owners."""
        self._asked_at: dict[str, float] = {}
        """Base model -> time at which its samplers were last asked which versions they hold, on the monotonic clock."""

    async def runs(self, *, owner: str | None) -> Json:
        """The newest runs, newest first, and then older ones that are active now; with totals of all runs.

        A run whose creation was refused is left out. `owner` None means the runs of all owners.
        """
        return await self._share("runs", owner, self._runs)

    async def sessions(self, *, owner: str | None) -> list[Json]:
        """The newest sessions, newest first."""
        return await self._share("sessions", owner, self._sessions)

    async def _share(self, name: str, owner: str | None, read: Callable[[str | None], Coroutine[Any, Any, Any]]) -> Any:
        """The list, read once for all requests within _FRESH_S."""
        key = (name, owner)
        shared = self._shared.get(key)
        if shared is None or (shared.read.done() and time.monotonic() - shared.begun_at > _FRESH_S):
            shared = self._shared[key] = _SharedList(time.monotonic(), asyncio.create_task(read(owner)))
        try:
            return await asyncio.shield(shared.read)
        except Exception:
            if self._shared.get(key) is shared:
                del self._shared[key]
            raise

    async def _runs(self, owner: str | None) -> Json:
        def mine(query: Any) -> Any:
            return query if owner is None else query.where(Session.owner == owner)

        name = func.substr(Model.user_metadata["name"].as_string(), 1, _SHOWN)
        there = mine(select(Model, Session, name).join(Session).where(Model.lora_rank.is_not(None)))
        there = there.options(*_NO_NOTES, defer(Model.user_metadata))
        newest = there.order_by(Model.created_at.desc(), Model.model_id.desc()).limit(MAX_RUNS)
        active = newest.where(
            or_(
                Model.last_request_at > time.time() - _ACTIVE_S,
                Model.model_id.in_(self._futures.busy_models()[: 5 * MAX_RUNS]),
            )
        )
        stored = select(func.count(), func.sum(Checkpoint.size_bytes)).where(exists_now())
        if owner is not None:
            stored = stored.where(Checkpoint.owner == owner)
        async with self._store.begin() as db:
            rows: Any = await db.execute(newest)
            found = {model.model_id: (model, session, name) for model, session, name in rows}
            num_runs = len(found)
            if num_runs == MAX_RUNS:
                rows = await db.execute(active)
                found |= {model.model_id: (model, session, name) for model, session, name in rows}
                counted = mine(select(func.count(Model.model_id)).join(Session)).where(Model.lora_rank.is_not(None))
                num_runs = await db.scalar(counted) or 0
            by_run = select(Checkpoint.run_id, func.count(), func.sum(Checkpoint.size_bytes)).where(
                Checkpoint.run_id.in_(found), exists_now()
            )
            grouped: Any = await db.execute(by_run.group_by(Checkpoint.run_id))
            sizes = {run_id: (count, int(size)) for run_id, count, size in grouped}
            num_checkpoints, num_bytes = (await db.execute(stored)).one()
        await self._read([model for model, _, _ in found.values()])
        return {
            "runs": [
                self._run(model, session, sizes, user_metadata={} if name is None else {"name": name})
                for model, session, name in found.values()
            ],
            "num_runs": num_runs,
            "num_checkpoints": num_checkpoints,
            "checkpoint_bytes": int(num_bytes or 0),
        }

    async def run(self, run_id: str, *, owner: str | None) -> Json:
        """One run with its checkpoints. Raises NotFound when the run is unknown, or belongs to another owner."""
        query = select(Model, Session).join(Session).where(Model.model_id == run_id).options(*_NO_NOTES)
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self._store.begin() as db:
            found = (await db.execute(query)).one_or_none()
            if found is None:
                raise NotFound(f"run_id: there is no training run {run_id!r}")
            checkpoints = list(
                await db.scalars(
                    select(Checkpoint)
                    .options(defer(Checkpoint.user_metadata))
                    .where(Checkpoint.run_id == run_id, Checkpoint.kind.in_(list(KINDS)), exists_now())
                    .order_by(Checkpoint.created_at.desc(), Checkpoint.path.desc())
                    .limit(MAX_CHECKPOINTS)
                )
            )
        model, session = found
        if time.monotonic() - self._asked_at.get(model.base_model, -_FRESH_S) >= _FRESH_S:
            self._asked_at[model.base_model] = time.monotonic()
            await self._clients.samplers.list_versions(model.base_model)
        sizes = {run_id: (len(checkpoints), sum(row.size_bytes for row in checkpoints))}
        await self._read([model])
        about = self._run(model, session, sizes, user_metadata=model.user_metadata)
        return about | {"checkpoints": [self._checkpoint(row) for row in checkpoints]}

    async def check_sees(self, run_id: str, *, owner: str | None) -> None:
        """Raises NotFound for a run that is unknown, or that belongs to another owner."""
        query = select(Session.owner).join(Model, Model.session_id == Session.session_id)
        found = await self._store.first(query.where(Model.model_id == run_id))
        if found is None or owner not in (None, found):
            raise NotFound(f"run_id: there is no training run {run_id!r}")

    def _run(
        self, model: Model, session: Session, sizes: dict[str, tuple[int, int]], *, user_metadata: dict[str, str]
    ) -> Json:
        count, size = sizes.get(model.model_id, (0, 0))
        pending = self._futures.num_pending(model.model_id)
        last_at = model.last_request_at or model.created_at
        read = self._reads.get(model.model_id)
        summary = None if read is None else read.summary
        layers = {"attn": model.train_attn, "mlp": model.train_mlp, "unembed": model.train_unembed}
        return {
            "run_id": model.model_id,
            "name": session.display_name or "",
            "base_model": model.base_model,
            "optimizer": model.optimizer,
            "lora_rank": model.lora_rank,
            "layers": [name for name, is_trained in layers.items() if is_trained],
            "user_metadata": user_metadata,
            "session_id": model.session_id,
            "created_at": model.created_at,
            "last_request_at": last_at,
            "ended_at": model.ended_at or session.ended_at,
            "session_ended_at": session.ended_at,
            "end_reason": session.end_reason,
            "num_pending": pending,
            "num_checkpoints": count,
            "checkpoint_bytes": size,
            "num_steps": summary.num_steps if summary else 0,
            "recent": summary.recent if summary else None,
        }

    async def _read(self, models: Sequence[Model]) -> None:
        """Reads the newest part of the histories that may have changed. The queries are few, however many the runs."""
        now = time.time()
        due = [model.model_id for model in models if self._is_due(model, now)]
        newest = await self._history.newest(due) if due else {}
        changed = []
        for model in models:
            run_id, read = model.model_id, self._reads.get(model.model_id)
            is_last_time = read is not None and read.at < _settled_at(model) <= now  # points may come late
            if run_id in newest and (read is None or is_last_time or read.newest != newest[run_id]):
                changed.append(run_id)
        summaries = await self._history.summaries(changed)
        for run_id in due:
            read = self._reads.get(run_id)
            summary = summaries.get(run_id, None if read is None else read.summary)
            self._reads[run_id] = _Reading(now, newest.get(run_id, 0), summary)

    def _is_due(self, model: Model, now: float) -> bool:
        read = self._reads.get(model.model_id)
        if read is None:
            return True
        is_busy = self._futures.num_pending(model.model_id) > 0 or now < _settled_at(model)
        return now - read.at > _FRESH_S and (is_busy or read.at < _settled_at(model))

    def _checkpoint(self, row: Checkpoint) -> Json:
        usable = self._clients.samplers.usable(row.base_model)
        return {
            "path": row.path,
            "kind": row.kind,
            "name": row.path.rsplit("/", 1)[1],
            "step": row.step,
            "size_bytes": row.size_bytes,
            "created_at": row.created_at,
            "expires_at": row.expires_at,
            "public": row.public,
            "inflight": row.inflight,
            "has_optimizer": row.has_optimizer,
            "num_holders": sum(row.version_id in replica.versions for replica in usable),
            "num_samplers": len(usable),
        }

    async def _sessions(self, owner: str | None) -> list[Json]:
        tags = func.substr(cast(Session.tags, Text), 1, _SHOWN + 1)
        detail = func.substr(Session.end_detail, 1, _SHOWN)
        query = select(Session, tags, detail).options(*_NO_NOTES)
        query = query.order_by(Session.created_at.desc(), Session.session_id.desc()).limit(MAX_SESSIONS)
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self._store.begin() as db:
            rows: Any = list(await db.execute(query))
            ids = [row.session_id for row, _, _ in rows]
            counts = {}
            for table in (Model, SamplingSession):
                grouped = select(table.session_id, func.count()).where(table.session_id.in_(ids))
                counts[table] = dict(list(await db.execute(grouped.group_by(table.session_id))))
        return [
            _session(row, num_runs=counts[Model], num_samplers=counts[SamplingSession])
            | {"tags": _first_tags(tags), "end_detail": detail}
            for row, tags, detail in rows
        ]


def _first_tags(text: str) -> list[str]:
    """The tags that a list shows, taken from the first characters of their JSON."""
    tags = [json.loads(each) for each in _QUOTED.findall(text)]
    return tags if len(text) <= _SHOWN else [*tags, "..."]


def _settled_at(model: Model) -> float:
    return (model.last_request_at or model.created_at) + _SETTLED_S


def _session(row: Session, *, num_runs: dict[str, int], num_samplers: dict[str, int]) -> Json:
    return {
        "session_id": row.session_id,
        "name": row.display_name or "",
        "project_id": row.project_id or DEFAULT_PROJECT,
        "created_at": row.created_at,
        "last_seen_at": row.last_seen_at,
        "ended_at": row.ended_at,
        "end_reason": row.end_reason,
        "sdk_version": row.sdk_version,
        "num_runs": num_runs.get(row.session_id, 0),
        "num_samplers": num_samplers.get(row.session_id, 0),
    }
