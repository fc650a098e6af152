"""The dashboard's recording in the background, and its parts."""

from __future__ import annotations

import time

from gateway.clients import Clients
from gateway.config import GatewayConfig
from gateway.dashboard.history import MetricHistory
from gateway.dashboard.lists import Lists
from gateway.dashboard.samples import RecentSamples
from gateway.dashboard.services import Services
from gateway.database.store import Store
from gateway.database.tables.history import MetricPoint
from gateway.database.tables.samples import RecentSample
from gateway.database.write_behind import WriteBehind
from gateway.futures import Futures
from gateway.metrics import Metrics
from gateway.moving import RunMover

_FORGET_S = 60.0
"""Pause between two deletions of old points and samples, in seconds."""


class Dashboard:
    """Holds the parts of the dashboard, writes what they record, and deletes what is old."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        store: Store,
        clients: Clients,
        futures: Futures,
        moving: RunMover,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._store = store
        self.history = MetricHistory(store, max_points=config.history_points)
        self.samples = RecentSamples(store, keep=config.recent_samples)
        self.services = Services(clients, moving, metrics)
        self.lists = Lists(store, history=self.history, futures=futures, clients=clients)
        self.behind = WriteBehind(self._write, what="the dashboard's history and samples")
        self.started_at = time.time()
        self._forget_at = time.monotonic() + _FORGET_S

    async def flush(self) -> None:
        """Writes all points and samples that wait. Raises SQLAlchemyError."""
        await self.behind.flush()

    async def _write(self) -> None:
        await self.history.flush()
        await self.samples.flush()
        if time.monotonic() >= self._forget_at:
            self._forget_at = time.monotonic() + _FORGET_S
            await self._forget()

    async def _forget(self) -> None:
        """Deletes points and samples that are too old, or too many for all runs and owners together."""
        now, config = time.time(), self._config
        await self._store.delete_old(
            MetricPoint.at, before=now - config.history_retention_s, keep_newest=config.max_history_points
        )
        await self._store.delete_old(
            RecentSample.at, before=now - config.recent_sample_retention_s, keep_newest=config.max_recent_samples
        )
