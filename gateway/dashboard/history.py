"""The history of each run's metrics: written in batches, in the background, and bounded.

The answer to a training operation becomes one row, even when it passes several times or through several gateways. When
a run has too many rows, neighbouring rows are merged, so that the whole run stays visible. A gateway that is killed
loses at most the last second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

from cachetools import LRUCache
from sqlalchemy import Table, delete, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.dashboard.points import Columns, by_steps, columns, point_of, thinned
from gateway.database.connection import all_of, parts
from gateway.database.store import Store
from gateway.database.tables.history import MetricPoint
from gateway.database.tables.sessions import Model
from tinsmith.threads import in_pool
from tinsmith.v1 import trainer_pb2 as pb

_TABLE = cast(Table, MetricPoint.__table__)
_MAX_WAITING = 20_000
"""Most points that wait while the database cannot be written. Further ones push out the oldest. A point has about
1 kB."""
_PER_WRITE = 1000
"""Most points that one transaction writes."""
_MAX_UNCHECKED = 10_000
"""Most runs in `MetricHistory._unchecked`. The next write to a forgotten run counts its rows."""
_TAIL_ROWS = 240
"""Number of rows that a summary reads."""


@dataclass(frozen=True, slots=True)
class HistorySummary:
    """The newest part of a run's history."""

    num_steps: int
    """Number of optimizer steps of the whole run."""
    recent: Columns
    """Columns of the last steps."""


class MetricHistory:
    """Records the metrics of runs, bounds them, and reads them."""

    def __init__(self, store: Store, *, max_points: int) -> None:
        """`max_points`: most points of each run, at least 16; 0 means no history."""
        self._store = store
        self._max_points = max_points
        self._waiting: deque[dict[str, Any]] = deque()
        """Columns of the points that are not written yet."""
        self._computing = asyncio.Lock()
        """Held while a thread computes the answer for a reader, because several threads at once would keep the
        interpreter's lock from the event loop."""
        self._unchecked: LRUCache[str, int] = LRUCache(_MAX_UNCHECKED)
        """run_id -> number of rows that this process has written since it last counted the run's rows."""

    def add(
        self,
        run_id: str,
        seq_id: int,
        reply: Any,
        *,
        ran: tuple[float, float] | None,
        body: bytes = b"",
        is_forward_only: bool = False,
    ) -> None:
        """Adds an answer of the trainer. Answers without metrics are ignored.

        `ran`: begin and end of the computation, in seconds since 1970; None means that it has ended now. `body`: the
        request of an OptimStep, when this gateway has it.
        """
        if self._max_points and isinstance(reply, (pb.ForwardBackwardResponse, pb.OptimStepResponse)):
            at, compute_s = (time.time(), None) if ran is None else (ran[1], ran[1] - ran[0])
            about = {"at": at, "body": body, "is_forward_only": is_forward_only, "compute_s": compute_s}
            self._waiting.append(point_of(run_id, seq_id, reply, **about))
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft()
            self._store.dropped_rows.labels(kind="point").inc()

    async def flush(self) -> None:
        """Writes the waiting points. If that fails, they go on waiting. Only one call may run at a time. Raises
        SQLAlchemyError."""
        points = sorted(self._waiting, key=itemgetter("run_id"))
        self._waiting.clear()
        try:
            while points:  # the points of a long outage, all at once, would block the event loop for seconds
                await self._write(points[:_PER_WRITE])
                del points[:_PER_WRITE]
        except BaseException:
            points.sort(key=itemgetter("at"))  # points of one moment keep their order
            self._waiting.extendleft(reversed(points))
            self._forget_oldest()
            raise

    async def _write(self, waiting: Sequence[dict[str, Any]]) -> None:
        by_run: dict[str, dict[int, dict[str, Any]]] = {}
        for point in waiting:
            by_run.setdefault(point["run_id"], {})[point["seq_id"]] = point
        async with self._store.begin() as db:
            for run_id, points in by_run.items():
                merged = await _merged_ranges(db, run_id, since=min(points))
                rows = [
                    point
                    for seq_id, point in points.items()
                    if not any(first <= seq_id <= last for first, last in merged)
                ]
                if rows:
                    await db.execute(self._store.insert(_TABLE).on_conflict_do_nothing(), rows)
        for run_id, points in by_run.items():
            is_new = run_id not in self._unchecked
            num_unchecked = self._unchecked.get(run_id, 0) + len(points)
            is_due = is_new or num_unchecked >= self._max_points // 16
            self._unchecked[run_id] = 0 if is_due else num_unchecked
            if is_due:
                await self._bound(run_id)

    async def _bound(self, run_id: str) -> None:
        """Merges neighbouring rows of a run that has too many."""
        mine = MetricPoint.run_id == run_id
        async with self._store.begin() as db:
            # This locks the run, so that one gateway at a time merges. SQLite has only one writer.
            await db.execute(select(Model.model_id).where(Model.model_id == run_id).with_for_update())
            count = await db.scalar(select(func.count()).select_from(MetricPoint).where(mine)) or 0
            if count <= self._max_points * 7 // 8:
                return
            points = await all_of(db, select(MetricPoint).where(mine).order_by(MetricPoint.seq_id))
            # The newest points are not merged, because another gateway may yet add an answer between them.
            older = points[: -self._max_points // 4]
            fewer = await in_pool(lambda: list(map(_as_dict, thinned(older, target=self._max_points // 4))))
            stale = [point.seq_id for point in older]
            db.expunge_all()
            for some in parts(stale):
                await db.execute(delete(MetricPoint).where(mine, MetricPoint.seq_id.in_(some)))
            for rows in parts(fewer):
                await db.execute(self._store.insert(_TABLE), rows)

    # Reading

    async def read(self, run_id: str, *, after: int = 0, num_steps: int = 0) -> dict[str, Any]:
        """The points of a run, as `columns` with "reset".

        The reader has the points up to the seq_id `after`, and counts `num_steps` steps in them. It gets the points
        after these when the count is right, else all of them, with "reset" true.
        """
        mine = MetricPoint.run_id == run_id
        known = select(func.sum(MetricPoint.num_steps), func.max(MetricPoint.at)).where(
            mine, MetricPoint.seq_id <= after
        )
        async with self._store.begin() as db:
            steps_before, at_before = (await db.execute(known)).one() if after else (0, None)
            is_same = bool(num_steps) and steps_before == num_steps
            rows = select(MetricPoint).where(mine, *([MetricPoint.seq_id > after] if is_same else []))
            points = await all_of(db, rows.order_by(MetricPoint.seq_id))
        before = (num_steps, at_before) if is_same else None
        async with self._computing:
            return await in_pool(_shown, points, before=before)

    async def newest(self, run_ids: Sequence[str]) -> dict[str, int]:
        """run_id -> seq_id of the newest point, for the runs that have points."""
        last = select(func.max(MetricPoint.seq_id)).where(MetricPoint.run_id == Model.model_id).scalar_subquery()
        async with self._store.begin() as db:
            found: Any = await db.execute(select(Model.model_id, last).where(Model.model_id.in_(run_ids)))
            return {run_id: seq_id for run_id, seq_id in found if seq_id is not None}

    async def summaries(self, run_ids: Sequence[str]) -> dict[str, HistorySummary]:
        """run_id -> summary, for the runs that have points; in two queries. At most PER_QUERY runs (connection.py)."""
        tails = [
            select(_TABLE).where(_TABLE.c.run_id == run_id).order_by(_TABLE.c.seq_id.desc()).limit(_TAIL_ROWS)
            for run_id in run_ids
        ]
        if not tails:
            return {}
        rows = union_all(*(select(tail.subquery()) for tail in tails))
        summed = select(MetricPoint.run_id, func.sum(MetricPoint.num_steps)).where(MetricPoint.run_id.in_(run_ids))
        found: dict[str, list[MetricPoint]] = {}
        async with self._store.begin() as db:
            for row in await db.execute(rows):
                found.setdefault(row.run_id, []).append(MetricPoint(**row._mapping))
            summed_up: Any = await db.execute(summed.group_by(MetricPoint.run_id))
            totals: dict[str, int] = dict(summed_up.all())
        for points in found.values():
            points.sort(key=lambda point: point.seq_id)
        return {run_id: _summary(points, total=totals[run_id]) for run_id, points in found.items()}


def _shown(points: Sequence[MetricPoint], *, before: tuple[int, float | None] | None) -> dict[str, Any]:
    """The answer of `read` for these points. `before`: the number of steps before them, which the reader has, and the
    time of the last one; None for a reader who gets all points."""
    steps, waiting = by_steps(points)
    if before is None:
        shown = steps or waiting  # a run without any step shows its batches
        return {"reset": True, **columns(shown, steps_before=0, at_before=None)}
    num_steps, at_before = before
    return {"reset": False, **columns(steps, steps_before=num_steps, at_before=at_before)}


def _summary(points: Sequence[MetricPoint], *, total: int) -> HistorySummary:
    """The summary of a run. `points`: the run's newest points. `total`: number of the run's steps."""
    steps, waiting = by_steps(points)
    shown = steps or waiting
    is_cut = len(points) == _TAIL_ROWS and len(shown) > 1  # the first step may lack its first batches
    begin = total - sum(point.num_steps for point in shown)
    if is_cut:
        begin += shown[0].num_steps
    at_before = shown[0].at if is_cut else None
    return HistorySummary(total, columns(shown[is_cut:], steps_before=begin, at_before=at_before))


async def _merged_ranges(db: AsyncSession, run_id: str, *, since: int) -> Iterable[tuple[int, int]]:
    """First and last seq_id of each of the run's merged points that may hold operations from `since` on."""
    query = select(MetricPoint.first_seq_id, MetricPoint.seq_id).where(
        MetricPoint.run_id == run_id, MetricPoint.seq_id >= since, MetricPoint.num_operations > 1
    )
    return [(first, last) for first, last in await db.execute(query)]


def _as_dict(point: MetricPoint) -> dict[str, Any]:
    return {column.key: getattr(point, column.key) for column in _TABLE.columns}
