"""Versions that samplers lack, and that the trainer publishes to them from a checkpoint: once for all who want one."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc.aio

from gateway.clients import Clients, meaning
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import Progress
from gateway.sampling.replicas import Replica
from gateway.storage.retirement import Retirement
from tinsmith.rpc.errors import (
    CheckpointNotFound,
    FailedPrecondition,
    NotReady,
    OutOfCapacity,
    ServiceError,
    VersionGone,
)
from tinsmith.v1 import trainer_pb2, types_pb2

logger = logging.getLogger(__name__)

_TOP_UP_S = 10.0
"""Between two attempts to give a version to those that lack it; twice that after another one so soon, and so on: they
may have no room for all that is sampled."""
_MAX_TOP_UP_S = 600.0
_MAX_TOPPED_UP = 4096
_ASK_TIMEOUT_S = 0.4
_WORDS = "publishing the weights to the sampler"


class Publishing:
    def __init__(self, clients: Clients, retirement: Retirement) -> None:
        self._clients = clients
        self._retirement = retirement
        self._publishing: dict[str, asyncio.Task[None]] = {}
        """By version."""
        self._topped_up: dict[str, tuple[float, float]] = {}
        """When a version was last published to those that lacked it, and for how long it is not again."""
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        tasks = [*self._background, *self._publishing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def provide(self, session: SamplingSession, replica: Replica, *, progress: Progress) -> bool:
        """After VERSION_NOT_LOADED from a replica: True once a usable one is known to hold the session's version, which
        is published if need be, or is with one that comes back meanwhile; False when none can have it now. Raises what
        the trainer says when it never will."""
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
                await samplers.list_versions(name)
            return bool(samplers.holders(name, version_id))
        finally:
            published.cancel()
            held.cancel()
            await asyncio.gather(published, held, return_exceptions=True)

    async def describe(self, base_model: str, progress: Progress) -> types_pb2.QueueStatus:
        """For who waits in `provide`. Raises TimeoutError where the trainer does not answer, which the progress then
        says."""
        try:
            trainer = self._clients.find_trainer(base_model)
            await trainer.stub.GetTrainerInfo(trainer_pb2.GetTrainerInfoRequest(), timeout=_ASK_TIMEOUT_S)
        except (ServiceError, grpc.aio.AioRpcError) as error:
            progress.paused("the weights wait to be published: the trainer does not answer")
            raise TimeoutError from error
        return types_pb2.QueueStatus(reason=_WORDS)

    def top_up(self, session: SamplingSession) -> None:
        """Has the version published to replicas that lack it where others hold it; nobody waits for that."""
        version_id, now = session.version_id, time.monotonic()
        lacking = self._clients.samplers.lacking(session.base_model, version_id)
        if not lacking or version_id in self._publishing:
            return
        last, pause_s = self._topped_up.get(version_id, (-_MAX_TOP_UP_S, 0.0))
        if now < last + pause_s:
            return
        again_soon = now < last + 2 * pause_s
        self._topped_up[version_id] = (now, min(2 * pause_s, _MAX_TOP_UP_S) if again_soon else _TOP_UP_S)
        while len(self._topped_up) > _MAX_TOPPED_UP:
            del self._topped_up[next(iter(self._topped_up))]
        addresses = ", ".join(replica.address for replica in lacking)
        task = asyncio.create_task(self._top_up(session, addresses))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _top_up(self, session: SamplingSession, addresses: str) -> None:
        try:
            if await self.publish(session, progress=Progress()):
                await self._clients.samplers.list_versions(session.base_model)
        except ServiceError as error:
            logger.info("%s cannot be published to %s: %s", session.version_id, addresses, error.message)

    async def publish(self, session: SamplingSession, *, progress: Progress) -> bool:
        """Has the trainer send the session's version to the samplers that lack it; False when it cannot now.

        Raises what the trainer says when it never will.
        """
        progress.active(_WORDS)
        version_id = session.version_id
        if not version_id:
            raise FailedPrecondition("the sampler does not hold the base model that it names")
        if version_id not in self._publishing:
            task = asyncio.create_task(self._publish_once(session))
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
            task.exception()  # nobody may wait for it any more

    async def _publish_once(self, session: SamplingSession) -> None:
        try:
            await self._publish_from(session.location, session)
        except (CheckpointNotFound, VersionGone):  # it was deleted, has expired, or its path was used again
            location = await self._retirement.find(session.location, session.version_id)
            if location is None:
                raise
            await self._publish_from(location, session)

    async def _publish_from(self, location: str, session: SamplingSession) -> None:
        trainer = await self._clients.trainer(session.base_model)
        request = trainer_pb2.PublishCheckpointRequest(location=location, version_id=session.version_id)
        try:
            await trainer.stub.PublishCheckpoint(request)
        except grpc.aio.AioRpcError as error:
            raise meaning(error, lost="the trainer is unreachable") from error
        logger.info("published %s of %s again", session.version_id, location)
