"""The dashboard's recording in the background, and its parts."""

from __future__ import annotations

import asyncio
import logging
import time

from sqlalchemy.exc import SQLAlchemyError

from gateway.clients import Clients
from gateway.config import GatewayConfig
from gateway.dashboard.history import History
from gateway.dashboard.lists import Lists
from gateway.dashboard.samples import RecentSamples
from gateway.dashboard.services import Services
from gateway.database.outages import log_failure
from gateway.database.store import Store
from gateway.futures import Futures
from gateway.metrics import Metrics
from gateway.tasks import to_its_end

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
_FORGET_S = 60.0


class Dashboard:
    """Holds the parts of the dashboard, writes what they record, and deletes what is old."""

    def __init__(
        self, config: GatewayConfig, *, store: Store, clients: Clients, futures: Futures, metrics: Metrics
    ) -> None:
        self._config = config
        self.history = History(store, max_points=config.history_points)
        self.samples = RecentSamples(store, keep=config.recent_samples)
        self.services = Services(clients, metrics)
        self.lists = Lists(store, history=self.history, futures=futures, clients=clients)
        self.started_at = time.time()

    async def run(self) -> None:
        """Flushes once a second, and deletes old rows once a minute."""
        forget_at = 0.0
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await to_its_end(self.flush())
                if time.monotonic() >= forget_at:
                    forget_at = time.monotonic() + _FORGET_S
                    await to_its_end(self._forget())
            except SQLAlchemyError as error:
                log_failure("the dashboard's history and samples cannot be written", error, by=logger)

    async def flush(self) -> None:
        """Writes all points and samples that wait. Raises SQLAlchemyError."""
        await self.history.flush()
        await self.samples.flush()

    async def _forget(self) -> None:
        now, config = time.time(), self._config
        await self.history.forget(before=now - config.history_retention_s, keep_newest=config.max_history_points)
        await self.samples.forget(before=now - config.recent_sample_retention_s, keep_newest=config.max_recent_samples)
