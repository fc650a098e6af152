"""Lets the trainer publish versions from checkpoints to samplers that lack them, once for all requests that wait."""

from __future__ import annotations

import asyncio
import logging
import time

from cachetools import LRUCache

from gateway.channel import ConnectionLost
from gateway.clients import Clients
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import FutureProgress
from gateway.placement import Placement
from gateway.sampling.replicas import Replica
from gateway.storage.retired_checkpoints import RetiredCheckpoints
from tinsmith.errors import CheckpointNotFound, FailedPrecondition, NotReady, OutOfCapacity, ServiceError, VersionGone
from tinsmith.tasks import cancel_all
from tinsmith.v1 import trainer_pb2, types_pb2

logger = logging.getLogger(__name__)

_TOP_UP_S = 10.0
"""Pause between two attempts to publish a version to more samplers. The pause doubles while attempts keep following
each other soon, because a sampler may have no room for all versions that are sampled. The pause ends when a sampler
that lacks the version begins to serve."""
_MAX_TOP_UP_S = 600.0
"""Longest such pause, in seconds."""
_MAX_TOPPED_UP = 4096
"""Most versions whose last `top_up` is kept in memory."""
_ASK_TIMEOUT_S = 0.4
"""Longest wait for the trainer's answer to a poll, in seconds."""
_WORDS = "publishing the weights to the sampler"
"""Text for a user whose request waits for a publish."""


class Publishing:
    """Publishes versions, each at most once at a time."""

    def __init__(self, clients: Clients, placement: Placement, retired: RetiredCheckpoints) -> None:
        self._clients = clients
        self._placement = placement
        self._retired = retired
        self._publishing: dict[str, asyncio.Task[None]] = {}
        """version_id -> the publish in progress."""
        self._topped_up: LRUCache[str, tuple[float, float]] = LRUCache(_MAX_TOPPED_UP)
        """version_id -> time of the last `top_up` on the monotonic clock, and the pause after it in seconds."""
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await cancel_all([*self._background, *self._publishing.values()])

    async def provide(self, session: SamplingSession, replica: Replica, *, progress: FutureProgress) -> bool:
        """Handles VERSION_NOT_LOADED from a replica. Returns True once a usable replica holds the session's version.

        Publishes the version, unless a replica that holds it comes back first. Returns False when the version cannot be
        published now. Raises the trainer's error when it never can.
        """
        samplers, name, version_id = self._clients.samplers, session.base_model, session.version_id
        replica.versions.discard(version_id)
        if samplers.holders(name, version_id):
            return True
        published = asyncio.create_task(self.publish(session, progress=progress))
        held = asyncio.create_task(samplers.wait_for_holder(name, version_id))
        try:
            await asyncio.wait((published, held), return_when=asyncio.FIRST_COMPLETED)
            if not held.done():
                if not await published:
                    return False
                await samplers.find_holder(name, version_id)
            return bool(samplers.holders(name, version_id))
        finally:
            await cancel_all([published, held])

    async def describe(self, session: SamplingSession, progress: FutureProgress) -> types_pb2.QueueStatus:
        """The status of a request that waits in `provide`.

        When the trainer does not answer, `progress` says so, and TimeoutError is raised.
        """
        try:
            trainer = await self._placement.of_checkpoint(session.location, session.base_model)
            await trainer.stub.GetTrainerInfo(trainer_pb2.GetTrainerInfoRequest(), timeout=_ASK_TIMEOUT_S)
        except ServiceError as error:
            progress.paused("the weights wait to be published: the trainer does not answer")
            raise TimeoutError from error
        return types_pb2.QueueStatus(reason=_WORDS)

    def top_up(self, session: SamplingSession) -> None:
        """Publishes the version to more replicas, in the background, if fewer replicas hold it than should."""
        version_id, now = session.version_id, time.monotonic()
        num_homes = self._clients.num_homes(session.base_model)
        num_wanted = self._clients.samplers.num_wanted(session.base_model, version_id, num_homes=num_homes)
        if not num_wanted or version_id in self._publishing:
            return
        last, pause_s = self._topped_up.get(version_id, (-_MAX_TOP_UP_S, 0.0))
        is_new = self._clients.samplers.has_newcomer(session.base_model, version_id, since=last)
        if now < last + pause_s and not is_new:
            return
        again_soon = now < last + 2 * pause_s and not is_new
        self._topped_up[version_id] = (now, min(2 * pause_s, _MAX_TOP_UP_S) if again_soon else _TOP_UP_S)
        task = asyncio.create_task(self._top_up(session, num_wanted))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _top_up(self, session: SamplingSession, num_samplers: int) -> None:
        try:
            if await self.publish(session, progress=FutureProgress(), num_samplers=num_samplers):
                await self._clients.samplers.list_versions(session.base_model)
        except ServiceError as error:
            logger.info("%s cannot be published to %d samplers: %s", session.version_id, num_samplers, error.message)

    async def publish(self, session: SamplingSession, *, progress: FutureProgress, num_samplers: int = 0) -> bool:
        """Lets the trainer send the session's version to the samplers that lack it, until `num_samplers` have it; 0
        means as many as the trainer sends every version to. Returns False when the trainer cannot do so now.

        Raises the trainer's error when it never can.
        """
        progress.active(_WORDS)
        version_id = session.version_id
        if not version_id:
            raise FailedPrecondition("the sampler does not hold the base model that it says it serves")
        if version_id not in self._publishing:
            task = asyncio.create_task(self._publish_once(session, num_samplers))
            self._publishing[version_id] = task
            task.add_done_callback(lambda task: self._ended(version_id, task))
        try:
            await asyncio.shield(self._publishing[version_id])
        except (NotReady, OutOfCapacity) as error:
            progress.paused(f"the weights cannot be published now: {error.message}")
            return False
        return True

    def _ended(self, version_id: str, task: asyncio.Task[None]) -> None:
        del self._publishing[version_id]
        if not task.cancelled():
            task.exception()  # read it, in case no request waits for the task any more

    async def _publish_once(self, session: SamplingSession, num_samplers: int) -> None:
        try:
            await self._publish_from(session.location, session, num_samplers)
        except (CheckpointNotFound, VersionGone):  # the checkpoint was deleted, has expired, or was replaced
            location = await self._retired.find(session.location, session.version_id)
            if location is None:
                raise
            await self._publish_from(location, session, num_samplers)

    async def _publish_from(self, location: str, session: SamplingSession, num_samplers: int) -> None:
        await self._clients.settle(lambda: self._clients.serving(session.base_model))
        trainer = await self._placement.of_checkpoint(location, session.base_model)
        request = trainer_pb2.PublishCheckpointRequest(
            location=location, version_id=session.version_id, num_samplers=num_samplers
        )
        try:
            await trainer.stub.PublishCheckpoint(request)
        except ConnectionLost as error:
            raise NotReady("the trainer is unreachable") from error
        logger.info("published %s of %s again", session.version_id, location)
