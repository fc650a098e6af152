"""Tries of one request: the choice of a replica for each try, and the pauses in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.channel import ConnectionLost
from gateway.sampling.lives import Suspicion
from gateway.sampling.replicas import Replica, Replicas
from tinsmith.rpc.errors import EngineDead, NotReady, ServiceError
from tinsmith.v1 import sampler_pb2

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Pause:
    """A pause that doubles with every use, up to 2 s."""

    next_s: float = 0.1

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s)
        self.next_s = min(2 * self.next_s, 2.0)


class Tries:
    """Sends a request to one replica after the other, and pauses when all have been tried.

    A request that has killed two replicas is not sent to another (lives.py).
    """

    def __init__(self, replicas: Replicas, base_model: str) -> None:
        self._replicas = replicas
        self._base_model = base_model
        self._replica: Replica | None = None
        self._version_id = ""
        self._in_vain: set[Replica] = set()
        self._suspicion = Suspicion()
        self._was_provided = False
        self._pause = Pause()

    @property
    def is_suspect(self) -> bool:
        """A sampler has died that this request may have killed."""
        return self._suspicion.deaths > 0

    async def route(self, request: sampler_pb2.SampleRequest | None) -> Replica:
        self._version_id = "" if request is None else request.version_id
        self._replica = await self._replicas.route(self._base_model, request, avoid=self._in_vain)
        return self._replica

    @asynccontextmanager
    async def at(self, replica: Replica) -> AsyncIterator[Callable[[], None]]:
        """Watches the request while the replica has it in work, which is until the block ends.

        The block gets a function, and must call it at the first token. A suspect waits here for its trial. Raises
        NotReady when the replica is lost, and ServiceError when the request has killed two replicas.
        """
        mine, life = self._suspicion, replica.life
        was_over = life.is_over
        if self.is_suspect:
            await life.trial.acquire()
            if life.is_over or replica.state != "serving":
                life.trial.release()
                raise NotReady(f"the sampler at {replica.address} went away before it had the request")
            life.on_trial = mine

        def begun() -> None:
            if life.on_trial is mine and mine.deaths < 2:
                life.on_trial = None
                life.suspects.add(mine)
                life.trial.release()

        died = False
        try:
            yield begun
        except NotReady as error:
            died = _is_death(error) and not was_over
            if died and life.ends(mine):
                raise _killer(mine, error) from error
            raise
        finally:
            if life.on_trial is mine:
                life.trial.release()
            if not died:
                life.suspects.discard(mine)
                life.on_trial = None if life.on_trial is mine else life.on_trial

    async def next(self) -> None:
        """Notes that the last try failed. Pauses when every replica that may have the request was tried."""
        if self._replica is not None:
            self._in_vain.add(self._replica)
        if self._in_vain.issuperset(self._replicas.candidates(self._base_model, self._version_id)):
            self._in_vain.clear()
            await self._pause.wait()

    async def provided(self) -> None:
        """Notes that the last try found no version, and that a replica has it now. Pauses from the second time on."""
        if self._was_provided:
            await self._pause.wait()
        self._was_provided = True


def _is_death(error: NotReady) -> bool:
    """Whether the sampler's process or engine died. A dead engine says whether it was computing the request."""
    if isinstance(error, EngineDead):
        return error.metadata.get("computing") != "no"
    return isinstance(error, ConnectionLost)


def _killer(mine: Suspicion, error: NotReady) -> ServiceError:
    logger.error("a request is not given to another sampler, because %d samplers died while they had it", mine.deaths)
    return ServiceError(
        f"{mine.deaths} samplers ended while they computed this request, so it is not given to another; the samplers' "
        f"logs have the cause (the last one's error: {error.message})"
    )
