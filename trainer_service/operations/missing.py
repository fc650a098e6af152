"""Gives up operations that never arrive, for which later ones of their model would wait for ever.

A client may fail to send an operation, or a proxy may refuse it. The client then continues with the next seq_id. The
SDK repeats a request for five minutes before it gives up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tinsmith.errors import ServiceError
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability.records import Body
from trainer_service.operation import Work
from trainer_service.scheduling.model_queue import Gap
from trainer_service.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

_LOOKS = 10
"""Number of looks within the time after which an operation is given up."""
_LONGEST_PAUSE_S = 30.0
"""Longest pause between two looks, in seconds."""


class LostOperations:
    """Puts a SkipOperation in the place of a lost operation, as the gateway does for requests that it refuses."""

    def __init__(
        self, scheduler: Scheduler, work_of: Callable[[pb.SkipOperationRequest], Work], *, timeout_s: float
    ) -> None:
        """`work_of`: Operations.work_of. `timeout_s`: time after the arrival of the newest waiting operation, after
        which the missing one is given up; above 0, in seconds."""
        self._scheduler = scheduler
        self._work_of = work_of
        self._timeout_s = timeout_s
        self._since_s: dict[Gap, float] = {}

    async def run(self) -> None:
        """Looks for lost operations until it is cancelled."""
        while True:
            await asyncio.sleep(min(self._timeout_s / _LOOKS, _LONGEST_PAUSE_S))
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Gives up each missing operation whose time is over. `now_s`: the present time, by time.monotonic."""
        self._since_s = {gap: self._since_s.get(gap, now_s) for gap in self._scheduler.models.gaps()}
        for gap, since_s in self._since_s.items():
            if now_s - since_s >= self._timeout_s:
                await self._give_up(gap)

    async def _give_up(self, gap: Gap) -> None:
        reason = (
            f"seq_id {gap.seq_id} has not arrived, and nothing came for {self._timeout_s:g} s "
            "(missing_operation_timeout_s); its client, or a proxy on the way, has given it up"
        )
        # The missing operation may have been a forward_backward, and a step with half of a batch would be wrong.
        request = pb.SkipOperationRequest(
            model_id=gap.model_id, seq_id=gap.seq_id, reason=reason, gradients_missing=True
        )
        try:
            operation, is_new = await self._scheduler.accept(gap.model_id, gap.seq_id, Body.pack("skip", request))
            if is_new:
                await self._scheduler.begin(operation, self._work_of(request))
        except ServiceError as error:
            logger.info("%s: seq_id %d is not given up: %s", gap.model_id, gap.seq_id, error)
        except Exception:  # for example, the journal's disk is full; the next look tries again
            logger.exception("%s: seq_id %d could not be given up", gap.model_id, gap.seq_id)
        else:
            logger.warning("%s: %s", gap.model_id, reason)
