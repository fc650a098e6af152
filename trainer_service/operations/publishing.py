"""Publishes checkpoints to the samplers: together with their save, or later on demand.

A version that samplers have may be needed again after a save has replaced its checkpoint. So a hidden copy of its files
is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tinsmith.errors import (
    CheckpointExists,
    CheckpointNotFound,
    DataCorrupted,
    NotFound,
    NotReady,
    OutOfCapacity,
    ServiceError,
    VersionGone,
)
from tinsmith.v1 import types_pb2
from tinsmith.v1.types_pb2 import PublishCertificate
from trainer_service.durability.executing import Name, other_work
from trainer_service.engine.engine import CapturedState, TrainingEngine
from trainer_service.operation import Turn
from trainer_service.operations.loads import Loads
from trainer_service.operations.models import LiveModels
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.locations import KINDS, Location
from trainer_service.weight_sync import Version
from trainer_service.weight_sync.canary import Scores
from trainer_service.weight_sync.certificate import Certified, Publisher

logger = logging.getLogger(__name__)

_SENT_KINDS = {types_pb2.CHECKPOINT_KIND_SAMPLER, types_pb2.CHECKPOINT_KIND_EPHEMERAL}
"""Kinds that are sent to the samplers when they are saved."""

_HEAD_START_S = 0.05


@dataclass(slots=True)
class Publishing:
    """Publishes versions, stores their certificates, and keeps replaced versions."""

    engine: TrainingEngine
    checkpoints: CheckpointStore
    publisher: Publisher
    scheduler: Scheduler
    models: LiveModels
    loads: Loads
    _running: dict[tuple[Location, str], asyncio.Task[Certified]] = field(default_factory=dict)
    _asked_for: set[str] = field(default_factory=set)
    """Versions of live models that were published on demand."""
    _scoring: asyncio.Lock = field(default_factory=asyncio.Lock)

    def sends(self, kind: types_pb2.CheckpointKind) -> bool:
        """True when a save of this kind is published, and there are samplers."""
        return kind in _SENT_KINDS and self.publisher.sender.has_samplers

    async def capture_and_score(self, turn: Turn, model_id: str) -> tuple[CapturedState, asyncio.Future[Scores]]:
        """Copies the model and scores the canary in one call on the compute thread.

        Returns as soon as the copy is made, with a future of the scores, so that the copy is stored and sent meanwhile.
        """
        loop = asyncio.get_running_loop()
        canary = self.publisher.canary(self.engine.weights(model_id).config)
        captured: asyncio.Future[CapturedState] = loop.create_future()

        def call() -> Scores:
            state = self.engine.capture(model_id, with_optimizer=False)
            loop.call_soon_threadsafe(lambda: captured.done() or captured.set_result(state))
            return self.engine.score(self.engine.weights(model_id), canary.sequences)

        scores = asyncio.ensure_future(turn.run(call, canary_tokens=canary.num_tokens))
        await asyncio.wait({captured, scores}, return_when=asyncio.FIRST_COMPLETED)
        if not captured.done():
            await scores  # raises, because the copy has failed
        return captured.result(), scores

    async def with_save(
        self,
        save: Callable[[], Awaitable[types_pb2.CheckpointInfo]],
        info: types_pb2.CheckpointInfo,
        state: CapturedState,
        scores: asyncio.Future[Scores],
    ) -> tuple[types_pb2.CheckpointInfo, Certified | None]:
        """Writes the files and publishes the version at the same time. If the files cannot be written, there must be no
        version. If no sampler serves the version, the files are enough.

        Sending the weights begins first, because a CPU that writes files delays each call to the samplers by some
        milliseconds.
        """
        version = Version(info.version_id, info.base_model, state.adapter)
        sent = asyncio.Event()
        publishing = asyncio.create_task(self.publisher.publish(version, scores, sent=sent))
        waiting = asyncio.create_task(sent.wait())
        try:
            await asyncio.wait([publishing, waiting], timeout=_HEAD_START_S, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            stored = await save()
        except BaseException:
            await asyncio.wait([publishing])
            await self.publisher.sender.withdraw(info.version_id)
            raise
        try:
            certified = await publishing
        except (NotReady, OutOfCapacity) as error:  # the first sample that needs the version publishes it
            logger.warning("%s is saved, but not published: %s", info.location, error)
            return stored, None
        except ServiceError as error:
            raise type(error)(
                f"{info.location} is saved, but a sampler refused it: {error}", **error.metadata
            ) from error
        if certified is not None:
            await self._keep(certified.certificate, info.location)
        return stored, certified

    async def publish(self, location: Location, version_id: str, *, num_samplers: int = 0) -> Certified:
        """Sends a stored version to the samplers. Concurrent calls for the same version share the work of the first.
        `num_samplers`: see WeightSender.publish.

        Raises VersionGone when the location now holds another version, NotReady when no sampler can be reached or
        measured, VersionRefused when the gap of a sampler is above the limit, and ServiceError for a publish that has
        ended the process too often.
        """
        key = location, version_id
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._noted(location, version_id, num_samplers))
            running.add_done_callback(lambda _: self._running.pop(key))
        return await asyncio.shield(running)

    def keep_replaced(self, location: Location) -> None:
        """Keeps a hidden copy of a checkpoint that is about to be replaced, if samplers may have its version."""
        with contextlib.suppress(CheckpointNotFound, CheckpointExists, DataCorrupted):
            info = self.checkpoints.info(location)
            hidden = _hidden(location, info.version_id)
            if hidden is not None and (info.kind in _SENT_KINDS or self._was_asked_for(info, location)):
                self.checkpoints.copy(location, hidden, ttl=None)

    async def forget(self, model_id: str) -> None:
        """Deletes a model's ephemeral checkpoints and hidden copies, and frees its versions in the samplers."""
        self._asked_for -= {version_id for version_id in self._asked_for if version_id.startswith(f"{model_id}@")}
        await self.checkpoints.writes(self.checkpoints.delete_ephemeral, model_id)
        await self.publisher.sender.remove_all(f"{model_id}@")

    async def _noted(self, location: Location, version_id: str, num_samplers: int) -> Certified:
        """Publishes a stored version, with a record of it in case the process ends meanwhile."""
        name = publication(location, version_id)
        await self.scheduler.executing.turn_to_store(*name)
        with self.scheduler.executing.other(name):
            return await self._publish(location, version_id, name, num_samplers)

    async def _publish(self, location: Location, version_id: str, name: Name, num_samplers: int) -> Certified:
        if location.run_id in self.models:
            self._asked_for.add(version_id)
        info, state = await self._find_version(location, version_id)
        scores = asyncio.ensure_future(self._score(state, name))
        version = Version(version_id, info.base_model, state.adapter)
        certified = await self.publisher.publish(version, scores, num_samplers=num_samplers)
        if certified is None:
            raise NotReady(f"{version_id} cannot be published: no sampler is serving; try again")
        await self._keep(certified.certificate, info.location)
        return certified

    async def _score(self, state: CapturedState, name: Name) -> Scores:
        """Scores the canary, for one publish at a time, so that micro-batches wait for at most one score."""
        canary = self.publisher.canary(state.config)
        async with self._scoring:
            return await self.scheduler.compute.run_alone(
                lambda: self.engine.score(state.adapter, canary.sequences),
                canary_tokens=canary.num_tokens,
                name=name,
            )

    async def _find_version(
        self, location: Location, version_id: str
    ) -> tuple[types_pb2.CheckpointInfo, CapturedState]:
        try:
            info, state = await self.loads.read(location, with_optimizer=False, field="location")
            if info.version_id == version_id:
                return info, state
            error: ServiceError = VersionGone(
                f"{location} now holds version {info.version_id!r}, not {version_id!r}", version_id=version_id
            )
        except CheckpointNotFound as missing:
            error = missing
        hidden = _hidden(location, version_id)
        if hidden is None or not await self.checkpoints.reads(self.checkpoints.exists, hidden):
            raise error
        return await self.loads.read(hidden, with_optimizer=False, field="location")

    async def _keep(self, certificate: PublishCertificate, location: str) -> None:
        """Stores a certificate with the version's files. Raises VersionRefused if it refuses the version."""
        where = Location.parse(location, field="location")
        try:
            await self.checkpoints.writes_to(where, self.checkpoints.put_certificate, where, certificate)
        except OutOfCapacity as error:  # no failure: the answer and the metrics have the certificate, too
            logger.warning("the certificate of %s is not stored: %s", location, error)
        self.publisher.check(certificate, location=location)

    def _was_asked_for(self, info: types_pb2.CheckpointInfo, location: Location) -> bool:
        """True when a version was published on demand: in this process, or before a restart, by its certificate."""
        if info.version_id in self._asked_for:
            return True
        try:
            self.checkpoints.certificate(location)
        except NotFound:
            return False
        return True


def publication(location: Location, version_id: str) -> Name:
    """Name of a publish on demand, for the record of executions."""
    return other_work(f"publish {location.run_id}", f"{location} {version_id}".encode())


def _hidden(location: Location, version_id: str) -> Location | None:
    """Location of the hidden copy of a version, which stays until its run is deleted. None for an id that is no version
    of this run."""
    run_id, _, name = version_id.rpartition("@")
    if run_id != location.run_id or not name.replace(".", "").isalnum():
        return None
    return Location(run_id, KINDS[types_pb2.CHECKPOINT_KIND_EPHEMERAL], name)
