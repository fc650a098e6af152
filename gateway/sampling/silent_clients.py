"""Stops samples that nobody waits for any more, because their client was killed or cannot reach the server.

A sample of a large model can keep a sampler busy for minutes. The client's next run would wait behind it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

from gateway.database.store import Store
from gateway.futures import Futures, Pending
from gateway.ids import target_of
from gateway.sampling.samples import KIND, Completions

logger = logging.getLogger(__name__)


class SilentClients:
    """A client is silent when it neither polls for a sample nor sends heartbeats of the sample's session."""

    def __init__(
        self, store: Store, futures: Futures, completions: Completions, *, timeout_s: float, interval_s: float
    ) -> None:
        """`timeout_s`: silence after which a client's samples are stopped. `interval_s`: time between two calls of
        `look`. Both in seconds."""
        self._store = store
        self._futures = futures
        self._completions = completions
        self._timeout_s = timeout_s
        self._longest_pause_s = max(timeout_s / 2, 2 * interval_s)
        self._looked_s = -math.inf
        self._listens_since_s = 0.0
        """Time since which this gateway could hear its clients without interruption, by time.monotonic."""

    async def look(self, now_s: float | None = None) -> None:
        """Stops the samples of silent clients. `now_s`: the present time, by time.monotonic; read here if it is None.

        Such a sample has no answer, as after a restart of the gateway. A client that comes back gets 410 for it, and
        samples again.
        """
        now_s = time.monotonic() if now_s is None else now_s
        if now_s - self._looked_s > self._longest_pause_s:  # this process was stopped, so it has heard nobody
            self._listens_since_s = now_s
        self._looked_s = now_s
        silent = [
            pending for pending in self._futures.of_kind(KIND) if self._silence_s(pending, now_s) > self._timeout_s
        ]
        if not silent:
            return
        await self._store.sessions.heartbeats.flush()
        without_beats = set(await self._store.sessions.silent(seen_before=time.time() - self._timeout_s))
        stopped = Counter[str]()
        for pending in silent:
            if pending.session_id in without_beats and self._silence_s(pending, time.monotonic()) > self._timeout_s:
                self._futures.drop(pending.request_id)
                stopped[pending.session_id] += 1
        for session_id, number in stopped.items():
            logger.info(
                "session %s was silent for %g s (sample_client_timeout_s); samples that are stopped: %d",
                session_id,
                self._timeout_s,
                number,
            )

    def _silence_s(self, pending: Pending, now_s: float) -> float:
        """Time since a client last polled for the sample, or submitted it, in seconds."""
        target = target_of(pending.request_id)
        polled_s = 0.0 if target is None else self._completions.polled_s(target)
        return now_s - max(pending.polled_s, polled_s, self._listens_since_s)
