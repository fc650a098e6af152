"""Samplers that follow a training run: each new sample starts on the newest version that was saved with kind
"inflight", and those that are generating go on with it from their next token.

A sampler that did not hear of a save, because it was away, may have gone on generating with older weights. When it is
back it is asked what it generates, the newest versions of those runs are published to it, and its generations move.
"""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from gateway.clients import Clients
from gateway.database.store import Store
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import Progress
from gateway.sampling.publishing import Publishing
from gateway.sampling.replicas import Replica
from tinsmith.rpc.errors import ServiceError
from tinsmith.rpc.paths import is_newer, run_of
from tinsmith.v1 import sampler_pb2, types_pb2

logger = logging.getLogger(__name__)

_MOVE_TIMEOUT_S = 60.0
"""A sampler moves its generations between two steps."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""After each attempt to bring up a sampler that is behind: the trainer may see later than we do that it is back."""


class Inflight:
    def __init__(self, store: Store, clients: Clients, publishing: Publishing) -> None:
        self._store = store
        self._clients = clients
        self._publishing = publishing
        self._moving: set[asyncio.Task[None]] = set()
        self._catching_up: dict[Replica, asyncio.Task[None]] = {}
        clients.samplers.on_serving = self._start_catch_up

    async def move(self, run_id: str, saved: types_pb2.CheckpointInfo) -> None:
        """The save is complete. One that was made before the newest, and is answered again, moves nothing back.

        The generations are not waited for.
        """
        if not await self._store.models.move_inflight(run_id, saved.version_id, saved.location, is_newer=_is_newer):
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
        tasks = [*self._moving, *self._catching_up.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Samplers that are behind

    def _start_catch_up(self, replica: Replica) -> None:
        """From the beginning, where it is on its way already."""
        if (before := self._catching_up.get(replica)) is not None:
            before.cancel()
        self._catching_up[replica] = asyncio.create_task(self._catch_up(replica))

    async def _catch_up(self, replica: Replica) -> None:
        """What it generates for runs that were saved without its knowledge goes on with their newest versions."""
        for pause_s in _PAUSES_S:
            try:
                versions = await replica.describe_versions()
            except grpc.aio.AioRpcError:
                return  # it is away again, and begins anew when it is back
            newest = await self._newest({version.version_id for version in versions if version.num_running})
            if not newest:
                return
            held = {version.version_id for version in versions}
            for session in newest:
                await self._bring(replica, session, is_held=session.version_id in held)
            await asyncio.sleep(pause_s)

    async def _newest(self, version_ids: set[str]) -> list[SamplingSession]:
        """The newest versions of the runs that are at newer ones than these, each with its run."""
        found: dict[str, SamplingSession] = {}
        for version_id in version_ids:
            run_id = run_of(version_id)
            run = await self._store.models.get(run_id, is_newest=True)
            newest = None if run is None else run.inflight_version_id
            if run is not None and newest is not None and _is_newer(newest, version_id):
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
                await self._publishing.publish(session, progress=Progress())
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
        if run is None or newest is None or not _is_newer(newest, session.version_id):
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
    """False where it fails: then generations go on with the version that they have. Those that a lost sampler had begin
    anew."""
    request = sampler_pb2.MoveGenerationsRequest(run_id=run_id, version_id=version_id)
    try:
        reply = await replica.stub.MoveGenerations(request, timeout=_MOVE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        logger.warning(
            "generations of %s at %s do not move to %s: %s",
            run_id, replica.address, version_id, error.details(),
        )  # fmt: skip
        return False
    if reply.num_sequences:
        logger.info("%d sequences at %s go on with %s", reply.num_sequences, replica.address, version_id)
    return True


def _is_newer(version_id: str, than: str) -> bool:
    """Of two versions of one run."""
    return is_newer(version_id, than, run_id=run_of(version_id))
