"""Inflight samplers: sampling sessions that follow a training run to its newest version.

A save with kind "inflight" makes a new version. Each new sample starts on the newest such version, and samples in work
go on with it from their next token.

A sampler that was unreachable during a save may still generate with an older version. When it is back, the gateway asks
it which versions it generates with, publishes the newest versions of those runs to it, and moves its generations.
"""

from __future__ import annotations

import asyncio
import logging

from gateway.clients import Clients
from gateway.database.store import Store
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import FutureProgress
from gateway.sampling.publishing import Publishing
from gateway.sampling.replicas import Replica
from tinsmith.errors import ServiceError, VersionNotLoaded
from tinsmith.rpc.paths import is_newer, run_of
from tinsmith.tasks import cancel_all
from tinsmith.v1 import sampler_pb2, types_pb2

logger = logging.getLogger(__name__)

_MOVE_TIMEOUT_S = 60.0
"""Longest time in which a sampler moves its generations, in seconds. It does so between two steps."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses after the attempts to catch a sampler up, in seconds. The trainer may notice later than the gateway that the
sampler is back."""


class Inflight:
    """Moves inflight samplers to the newest version of their run."""

    def __init__(self, store: Store, clients: Clients, publishing: Publishing) -> None:
        self._store = store
        self._clients = clients
        self._publishing = publishing
        self._moving: set[asyncio.Task[None]] = set()
        self._catching_up: dict[Replica, asyncio.Task[None]] = {}
        clients.samplers.on_serving = self._start_catch_up

    async def move(self, run_id: str, saved: types_pb2.CheckpointInfo) -> None:
        """Moves the run's inflight samplers to a save that is complete, unless they are at a newer version already.

        Does not wait for the samplers to move their generations.
        """
        if not await self._store.models.move_inflight(run_id, saved.version_id, saved.location):
            return
        for replica in self._clients.samplers.usable(saved.base_model):
            task = asyncio.create_task(self._move(replica, run_id, saved.version_id))
            self._moving.add(task)
            task.add_done_callback(self._moving.discard)

    async def _move(self, replica: Replica, run_id: str, version_id: str) -> None:
        if not await _move_generations(replica, run_id, version_id):
            self._start_catch_up(replica)

    async def close(self) -> None:
        self._clients.samplers.on_serving = None
        await cancel_all([*self._moving, *self._catching_up.values()])

    # Samplers that are behind

    def _start_catch_up(self, replica: Replica) -> None:
        """Starts `_catch_up` for the sampler. A call that is still running is cancelled first."""
        if (before := self._catching_up.get(replica)) is not None:
            before.cancel()
        self._catching_up[replica] = asyncio.create_task(self._catch_up(replica))

    async def _catch_up(self, replica: Replica) -> None:
        """Moves the sampler's generations to the newest versions of their runs, if it has missed a save."""
        for pause_s in _PAUSES_S:
            try:
                versions = await replica.describe_versions()
            except ServiceError:
                return  # the sampler is unreachable again; another _catch_up starts when it is back
            newest = await self._newest({version.version_id for version in versions if version.num_running})
            if not newest:
                return
            held = {version.version_id for version in versions}
            for session in newest:
                await self._bring(replica, session, is_held=session.version_id in held)
            await asyncio.sleep(pause_s)

    async def _newest(self, version_ids: set[str]) -> list[SamplingSession]:
        """The newest versions of runs that have a newer version than one of these, as sampling sessions."""
        found: dict[str, SamplingSession] = {}
        for version_id in version_ids:
            run_id = run_of(version_id)
            run = await self._store.models.get(run_id, is_newest=True)
            newest = None if run is None else run.inflight_version_id
            if run is not None and newest is not None and is_newer(newest, version_id, run_id=run_id):
                found[run_id] = SamplingSession(
                    base_model=run.base_model,
                    version_id=newest,
                    location=run.inflight_location or "",
                    inflight_run_id=run_id,
                )
        return list(found.values())

    async def _bring(self, replica: Replica, session: SamplingSession, *, is_held: bool) -> None:
        if not is_held:
            logger.info("%s generates with an older version than %s", replica.address, session.version_id)
            try:
                # The sampler may be none of the version's homes, and only a publish to all is sure to reach it.
                num_samplers = len(self._clients.samplers.all)
                await self._publishing.publish(session, progress=FutureProgress(), num_samplers=num_samplers)
            except ServiceError as error:
                logger.info("%s cannot be published to %s: %s", session.version_id, replica.address, error.message)
                return
        await _move_generations(replica, session.inflight_run_id or "", session.version_id)

    async def resolve(self, session: SamplingSession) -> SamplingSession:
        """The sampling session with the version that a sample which starts now is drawn from."""
        if session.inflight_run_id is None:
            return session
        run = await self._store.models.get(session.inflight_run_id, is_newest=True)
        newest = None if run is None else run.inflight_version_id
        if run is None or newest is None or not is_newer(newest, session.version_id, run_id=session.inflight_run_id):
            return session
        return SamplingSession(
            sampling_session_id=session.sampling_session_id,
            session_id=session.session_id,
            base_model=session.base_model,
            model_path=session.model_path,
            version_id=newest,
            location=run.inflight_location or "",
            created_at=session.created_at,
            inflight_run_id=session.inflight_run_id,
        )


async def _move_generations(replica: Replica, run_id: str, version_id: str) -> bool:
    """Lets the sampler move its generations of the run to a version. Returns False when that fails.

    After a failure the generations go on with their present version, or start again elsewhere if the sampler is lost.
    """
    request = sampler_pb2.MoveGenerationsRequest(run_id=run_id, version_id=version_id)
    try:
        reply = await replica.stub.MoveGenerations(request, timeout=_MOVE_TIMEOUT_S)
    except ServiceError as error:
        # A sampler that is none of the version's homes seldom generates with another version of the run.
        level = logging.DEBUG if isinstance(error, VersionNotLoaded) else logging.WARNING
        text = "generations of %s at %s cannot be moved to %s: %s"
        logger.log(level, text, run_id, replica.address, version_id, error.message)
        return False
    if reply.num_sequences:
        logger.info("%d sequences at %s go on with %s", reply.num_sequences, replica.address, version_id)
    return True
