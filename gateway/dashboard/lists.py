"""What the page lists: runs with their newest numbers, sessions, checkpoints."""

from __future__ import annotations

import time
from collections import OrderedDict

from sqlalchemy import func, select

from gateway.clients import Clients
from gateway.dashboard.history import History, Summary
from gateway.database.catalog import exists_now
from gateway.database.store import Store
from gateway.database.tables.checkpoints import Checkpoint
from gateway.database.tables.sessions import Model, SamplingSession, Session
from gateway.futures import Futures
from gateway.views import DEFAULT_PROJECT, Json
from tinsmith.rpc.errors import NotFound
from tinsmith.rpc.paths import KINDS

MAX_RUNS = 100
"""In a list; the newest."""
MAX_SESSIONS = 200
MAX_CHECKPOINTS = 500
_FRESH_S = 1.5
_SETTLED_S = 120.0
"""After the last request for so long, and with nothing in work, the numbers of a run are final."""
_MAX_KEPT = 2 * MAX_RUNS


class Lists:
    def __init__(self, store: Store, *, history: History, futures: Futures, clients: Clients) -> None:
        self._store = store
        self._history = history
        self._futures = futures
        self._clients = clients
        self._summaries: OrderedDict[str, tuple[float, Summary | None]] = OrderedDict()
        """When they were read; those read last come last."""
        self._asked_at: dict[str, float] = {}
        """By base model: when its samplers were asked what they hold."""

    async def runs(self, *, owner: str | None) -> list[Json]:
        """The newest, newest first, without what was refused at its creation. `owner`: whose; None: everyone's."""
        query = select(Model, Session).join(Session).where(Model.lora_rank.is_not(None))
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self._store.begin() as db:
            page = query.order_by(Model.created_at.desc(), Model.model_id.desc()).limit(MAX_RUNS)
            found = [(model, session) for model, session in await db.execute(page)]
            stored = select(Checkpoint.run_id, func.count(), func.sum(Checkpoint.size_bytes)).where(
                Checkpoint.run_id.in_([model.model_id for model, _ in found]), exists_now()
            )
            sizes = {
                run_id: (count, int(size))
                for run_id, count, size in await db.execute(stored.group_by(Checkpoint.run_id))
            }
        return [await self._run(model, session, sizes) for model, session in found]

    async def run(self, run_id: str, *, owner: str | None) -> Json:
        """Raises NotFound for one that is unknown, or somebody else's."""
        query = select(Model, Session).join(Session).where(Model.model_id == run_id)
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self._store.begin() as db:
            found = (await db.execute(query)).one_or_none()
            if found is None:
                raise NotFound(f"run_id: there is no training run {run_id!r}")
            checkpoints = list(
                await db.scalars(
                    select(Checkpoint)
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
        about = await self._run(model, session, sizes)
        return about | {"checkpoints": [self._checkpoint(row) for row in checkpoints]}

    async def check_sees(self, run_id: str, *, owner: str | None) -> None:
        """Raises NotFound for a run that is unknown, or somebody else's."""
        query = select(Session.owner).join(Model, Model.session_id == Session.session_id)
        async with self._store.begin() as db:
            found = await db.scalar(query.where(Model.model_id == run_id))
        if found is None or owner not in (None, found):
            raise NotFound(f"run_id: there is no training run {run_id!r}")

    async def _run(self, model: Model, session: Session, sizes: dict[str, tuple[int, int]]) -> Json:
        count, size = sizes.get(model.model_id, (0, 0))
        pending = self._futures.num_pending(model.model_id)
        last_at = model.last_request_at or model.created_at
        summary = await self._summary(model, is_busy=bool(pending) or time.time() - last_at < _SETTLED_S)
        layers = {"attn": model.train_attn, "mlp": model.train_mlp, "unembed": model.train_unembed}
        return {
            "run_id": model.model_id,
            "name": session.display_name or "",
            "base_model": model.base_model,
            "optimizer": model.optimizer,
            "lora_rank": model.lora_rank,
            "layers": [name for name, is_trained in layers.items() if is_trained],
            "user_metadata": model.user_metadata,
            "session_id": model.session_id,
            "created_at": model.created_at,
            "last_request_at": last_at,
            "session_ended_at": session.ended_at,
            "end_reason": session.end_reason,
            "num_pending": pending,
            "num_checkpoints": count,
            "checkpoint_bytes": size,
            "num_steps": summary.num_steps if summary else 0,
            "recent": summary.recent if summary else None,
        }

    async def _summary(self, model: Model, *, is_busy: bool) -> Summary | None:
        read_at, summary = self._summaries.get(model.model_id, (0.0, None))
        settled_at = (model.last_request_at or model.created_at) + _SETTLED_S
        if time.time() - read_at > _FRESH_S and (is_busy or read_at < settled_at):
            read_at = time.time()
            summary = await self._history.summary(model.model_id)
            self._summaries[model.model_id] = (read_at, summary)
            self._summaries.move_to_end(model.model_id)
            if len(self._summaries) > _MAX_KEPT:
                self._summaries.popitem(last=False)
        return summary

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
            "user_metadata": row.user_metadata,
            "num_holders": sum(row.version_id in replica.versions for replica in usable),
            "num_samplers": len(usable),
        }

    async def sessions(self, *, owner: str | None) -> list[Json]:
        """The newest, newest first."""
        query = select(Session).order_by(Session.created_at.desc(), Session.session_id.desc()).limit(MAX_SESSIONS)
        if owner is not None:
            query = query.where(Session.owner == owner)
        async with self._store.begin() as db:
            rows = list(await db.scalars(query))
            ids = [row.session_id for row in rows]
            counts = {}
            for table in (Model, SamplingSession):
                grouped = select(table.session_id, func.count()).where(table.session_id.in_(ids))
                counts[table] = dict(list(await db.execute(grouped.group_by(table.session_id))))
        return [_session(row, num_runs=counts[Model], num_samplers=counts[SamplingSession]) for row in rows]


def _session(row: Session, *, num_runs: dict[str, int], num_samplers: dict[str, int]) -> Json:
    return {
        "session_id": row.session_id,
        "name": row.display_name or "",
        "project_id": row.project_id or DEFAULT_PROJECT,
        "created_at": row.created_at,
        "last_seen_at": row.last_seen_at,
        "ended_at": row.ended_at,
        "end_reason": row.end_reason,
        "end_detail": row.end_detail,
        "sdk_version": row.sdk_version,
        "tags": row.tags,
        "user_metadata": row.user_metadata,
        "num_runs": num_runs.get(row.session_id, 0),
        "num_samplers": num_samplers.get(row.session_id, 0),
    }
