"""Samplers that follow a training run: each new sample starts on the newest version that was saved with kind
"inflight", and those that are generating go on with it from their next token."""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from gateway.clients import Clients
from gateway.replicas import Replica
from gateway.store import Store
from gateway.tables import SamplingSession
from tinsmith.v1 import sampler_pb2, types_pb2

logger = logging.getLogger(__name__)

_MOVE_TIMEOUT_S = 60.0
"""A sampler moves its generations between two steps."""


class Inflight:
    def __init__(self, store: Store, clients: Clients) -> None:
        self._store = store
        self._clients = clients
        self._moving: set[asyncio.Task[None]] = set()

    async def move(self, run_id: str, saved: types_pb2.CheckpointInfo) -> None:
        """The save is complete. One that was made before the newest, and is answered again, moves nothing back.

        The generations are not waited for.
        """
        if not await self._store.move_inflight(run_id, saved.version_id, saved.location, is_newer=_is_newer):
            return
        request = sampler_pb2.MoveGenerationsRequest(run_id=run_id, version_id=saved.version_id)
        for replica in self._clients.samplers.usable(saved.base_model):
            task = asyncio.create_task(_move_generations(replica, request))
            self._moving.add(task)
            task.add_done_callback(self._moving.discard)

    async def close(self) -> None:
        for task in self._moving:
            task.cancel()
        await asyncio.gather(*self._moving, return_exceptions=True)

    async def resolve(self, session: SamplingSession) -> SamplingSession:
        """The sampling session with the version that a sample which starts now is drawn from."""
        if session.inflight_run_id is None:
            return session
        run = await self._store.model(session.inflight_run_id)
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


async def _move_generations(replica: Replica, request: sampler_pb2.MoveGenerationsRequest) -> None:
    """Where it fails, generations end on the version that they have; those that a lost sampler had begin anew."""
    try:
        reply = await replica.stub.MoveGenerations(request, timeout=_MOVE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        logger.warning(
            "generations of %s at %s do not move to %s: %s",
            request.run_id, replica.address, request.version_id, error.details(),
        )  # fmt: skip
    else:
        if reply.num_sequences:
            logger.info("%d sequences at %s go on with %s", reply.num_sequences, replica.address, request.version_id)


def _is_newer(version_id: str, than: str) -> bool:
    """Of two versions of one run, "<run>@<seq_id>"."""
    return int(version_id.rpartition("@")[2]) > int(than.rpartition("@")[2])
