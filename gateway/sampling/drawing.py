"""Brings one request to a sampler, and gives the sampler's answer, for the Tinker API and the OpenAI API.

replicas.py chooses a sampler. When that sampler is lost or full, another one is tried; when there is none, the request
waits. A version that no sampler holds is published by the trainer, once for all requests that want it (publishing.py).
A version that only some samplers hold is sampled there, and published to the others meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import grpc.aio

from gateway.channel import ConnectionLost
from gateway.clients import Clients
from gateway.convert import num_tokens
from gateway.dashboard.samples import RecentSamples
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import FutureProgress, ran_of
from gateway.ids import fingerprint
from gateway.metrics import Metrics
from gateway.sampling.inflight import Inflight
from gateway.sampling.lives import Suspicion
from gateway.sampling.publishing import Publishing
from gateway.sampling.replicas import Replica
from gateway.sampling.suspects import Suspects
from gateway.tenants.ledger import Ledger
from gateway.tenants.limits import Hold
from tinsmith.errors import (
    CheckpointNotFound,
    EngineDead,
    NotReady,
    OutOfCapacity,
    ServiceError,
    VersionGone,
    VersionNotLoaded,
)
from tinsmith.rpc.auth import ALONE, PROMPT_ALONE
from tinsmith.rpc.logs import REQUEST_ID_METADATA
from tinsmith.tasks import Pause
from tinsmith.threads import in_pool
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2

logger = logging.getLogger(__name__)

_SMALL_BYTES = 2**16
"""A request of up to this size is hashed on the event loop, in about 0.1 ms."""

T = TypeVar("T")


class Drawing:
    """One request on its way to a sampler's answer.

    A request that may have killed a replica has its prompt computed alone at the next one. If it may have killed two,
    it is sent to no more than one other, which it has to itself (lives.py).
    """

    def __init__(
        self,
        drawings: Drawings,
        session: SamplingSession,
        request: pb.SampleRequest | None,
        *,
        request_id: str,
        progress: FutureProgress | None = None,
        wait_s: float | None = None,
    ) -> None:
        """`session`: the weights. `request` None means a call about text, which any sampler of the base model can
        answer. `wait_s`: longest wait for a sampler, in seconds; None means without end."""
        self.progress = progress or FutureProgress()
        self.ran: tuple[float, float] | None = None
        """Begin and end of the sampler's computation, in seconds since 1970; None while not known."""
        self._session = session
        self._request = request
        self._replicas = drawings.clients.samplers
        self._publishing = drawings.publishing
        self._inflight = drawings.inflight
        self._request_id = request_id
        self._wait_s = wait_s
        self._describe: Callable[[], Awaitable[types_pb2.QueueStatus]] | None = None
        """Asks the service that the request waits for."""
        self._replica: Replica | None = None
        self._in_vain: set[Replica] = set()
        self._suspects = drawings.suspects
        self._suspicion = Suspicion()
        self._content: str | None = None
        self._was_provided = False
        self._pause = Pause()

    @property
    def is_suspect(self) -> bool:
        """Whether a sampler has died that this request may have killed."""
        return self._suspicion.deaths > 0

    async def describe(self) -> types_pb2.QueueStatus:
        """Asks the service what the request waits for.

        Raises TimeoutError when no service can tell; `progress` then has the reason.
        """
        if self._describe is None:
            raise TimeoutError
        return await self._describe()

    async def run(self, call: Callable[[Replica], Awaitable[T]]) -> T:
        """The result of `call` with the first replica that answers. Sets `version_id` and `follow_run` of the request.

        Raises the last NotReady or OutOfCapacity when no replica has answered within `wait_s`.
        """
        give_up_at = math.inf if self._wait_s is None else time.monotonic() + self._wait_s
        while True:
            self._suspicion.deaths = max(self._suspicion.deaths, await self._deaths_before())
            drawn_from = await self._resolve()
            if not self._replicas.usable(drawn_from.base_model):
                self.progress.paused("the sampler is unreachable")
            replica = await self.route()
            if self._request is not None:
                self._publishing.top_up(drawn_from)
            if self.is_suspect:
                self.progress.paused("a sampler died with this request in work; such requests run one at a time")
            elif replica.life.is_closed:
                self.progress.paused("the sampler runs a request alone, with which other samplers died")
            try:
                return await call(replica)
            except NotReady as error:
                cause: ServiceError = error
                self.progress.paused("the sampler is unreachable")
            except OutOfCapacity as error:
                cause = error
                self.progress.paused(f"the sampler is full: {error.message}")
            except VersionNotLoaded:
                is_provided = await self._provide(drawn_from, replica, give_up_at=give_up_at)
                if is_provided and time.monotonic() < give_up_at:
                    if self._was_provided:
                        await self._pause.wait()
                    self._was_provided = True
                    continue
                cause = NotReady(f"the weights of {drawn_from.model_path} cannot be sent to the sampler now; try again")
            if time.monotonic() >= give_up_at:
                raise cause
            await self.next()

    async def _deaths_before(self) -> int:
        """The deaths of requests with this content. Raises ServiceError when such a request is condemned."""
        if self._suspects.are_none or self._request is None:
            return 0
        known = self._suspects.find(await self._content_of(self._request))
        if known.is_condemned:
            raise _killer(known)
        return known.deaths

    async def _content_of(self, request: pb.SampleRequest) -> str:
        """A hash of the content of the request, and of its owner (`cache_salt`, empty where any key is accepted). A
        repeat of the request has the same hash."""
        if self._content is None:

            def hashed() -> str:
                bare = pb.SampleRequest()
                bare.CopyFrom(request)
                bare.sampling_params.ClearField("seed")  # chosen by the gateway if the client gave none
                bare.ClearField("follow_run")
                bare.version_id = self._session.version_id
                return fingerprint(self._session.base_model, bare.SerializeToString(deterministic=True))

            is_small = request.ByteSize() <= _SMALL_BYTES
            self._content = hashed() if is_small else await in_pool(hashed)  # a large request may have pictures
        return self._content

    async def _resolve(self) -> SamplingSession:
        """The weights that the request is drawn from now."""
        if self._request is None:
            return self._session
        is_fixed = self._session.inflight_run_id is None
        drawn_from = self._session if is_fixed else await self._inflight.resolve(self._session)
        self._request.version_id = drawn_from.version_id
        self._request.follow_run = drawn_from.inflight_run_id or ""
        return drawn_from

    async def route(self) -> Replica:
        """Waits for a replica. Raises NotReady when there is none within `wait_s`."""
        name = self._session.base_model
        try:
            async with asyncio.timeout(self._wait_s):
                self._replica = await self._replicas.route(
                    name, self._request, avoid=self._in_vain, alone=self._suspicion.runs_alone
                )
        except TimeoutError:
            raise NotReady(f"no sampler of {name!r} can be reached; try again") from None
        return self._replica

    async def next(self) -> None:
        """Notes that the last try failed. Pauses when every replica that may have the request was tried."""
        if self._replica is not None:
            self._in_vain.add(self._replica)
        version_id = "" if self._request is None else self._request.version_id
        if self._in_vain.issuperset(self._replicas.candidates(self._session.base_model, version_id)):
            self._in_vain.clear()
            await self._pause.wait()

    async def _provide(self, session: SamplingSession, replica: Replica, *, give_up_at: float) -> bool:
        """Lets the trainer publish the version. Returns False when the version cannot be published now. Raises the
        trainer's error when it never can."""
        self._describe = lambda: self._publishing.describe(session, self.progress)
        try:
            async with asyncio.timeout(None if self._wait_s is None else max(0.0, give_up_at - time.monotonic())):
                return await self._publishing.provide(session, replica, progress=self.progress)
        except TimeoutError:
            return False
        except (CheckpointNotFound, VersionGone):
            if (await self._inflight.resolve(self._session)).version_id == session.version_id:
                raise
            return True  # the run has a newer inflight version by now, and the older one is gone
        finally:
            self._describe = None

    # Calls of one replica

    async def sample(self, replica: Replica) -> pb.SampleResponse:
        """The answer in one piece. A suspect's call is a stream, because its first piece may end its trial."""
        request = self._request
        assert request is not None
        if not self.is_suspect:
            return await self.call(replica, replica.stub.Sample, request, weight=request.num_samples)
        result = pb.SampleResponse()
        async with aclosing(self.stream(replica)) as pieces:
            async for piece in pieces:
                result = piece.result
        return result

    async def stream(self, replica: Replica) -> AsyncGenerator[pb.StreamSampleResponse, None]:
        """The answer in pieces: deltas, and then the result. If the request has to run alone, the sampler has ended it
        before the first piece, because the others may not wait for a slow reader."""
        if self._suspicion.runs_alone:
            for piece in [piece async for piece in self._stream(replica)]:
                yield piece
        else:
            async with aclosing(self._stream(replica)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _stream(self, replica: Replica) -> AsyncGenerator[pb.StreamSampleResponse, None]:
        request = self._request
        assert request is not None
        wrapped = pb.StreamSampleRequest(request=request)
        async with self._in_work(replica, replica.stub.StreamSample, wrapped, weight=request.num_samples) as work:
            call, begun = work
            await self._confirmed(call, replica)
            while (piece := await call.read()) is not grpc.aio.EOF:
                begun()
                if piece.WhichOneof("event") is not None:  # an empty piece only ends the request's trial
                    yield piece

    async def ask(self, replica: Replica, rpc: Callable[[Any], Any], request: Any) -> Any:
        """The reply to an RPC about text, which `rpc` takes from a stub."""
        if not self._asks_to_be_alone:
            return await self.call(replica, rpc(replica.stub), request)
        async with self._in_work(replica, rpc(replica.confirming), request, weight=1) as (call, _):
            await self._confirmed(call, replica)
            return await call.read()

    async def call(self, replica: Replica, rpc: Any, request: Any, *, weight: int = 1) -> Any:
        """The reply to a unary RPC of the replica's stub."""
        async with self._in_work(replica, rpc, request, weight=weight) as (call, _):
            return await call

    @property
    def _asks_to_be_alone(self) -> bool:
        """Whether the sampler must say that the request is alone there, because other gateways use it, too."""
        return self._suspicion.runs_alone and self._replicas.are_shared

    async def _confirmed(self, call: Any, replica: Replica) -> None:
        """Waits until the sampler has nothing else in work, or computes nothing else, if that was asked."""
        if self._asks_to_be_alone:
            self._suspicion.is_alone_for_sure = ALONE in tuple(await call.initial_metadata() or ())
        elif self._suspicion.is_on_trial and PROMPT_ALONE in tuple(await call.initial_metadata() or ()):
            replica.life.tries(self._suspicion)

    @asynccontextmanager
    async def _in_work(
        self, replica: Replica, rpc: Any, request: Any, *, weight: int
    ) -> AsyncIterator[tuple[Any, Callable[[], None]]]:
        """Starts a call, which is the replica's work until the block ends. Gives the call, and the function of
        `_watched`."""
        metadata = ((REQUEST_ID_METADATA, self._request_id),) if self._request_id else ()
        if self._asks_to_be_alone:
            metadata = (*metadata, ALONE)
        elif self._suspicion.is_on_trial:
            metadata = (*metadata, PROMPT_ALONE)
        async with self._watched(replica) as begun:
            self.progress.active("the sampler is working on the request")
            self._describe = lambda: self._ask(replica)
            call = rpc(request, metadata=metadata or None)
            try:
                with self._replicas.holding(replica, call, weight=weight):
                    yield call, begun
            finally:
                self._describe = None
                call.cancel()
                if not call.cancelled():
                    self.ran = ran_of(await call.trailing_metadata())

    async def _ask(self, replica: Replica) -> types_pb2.QueueStatus:
        if replica.state != "serving":
            self.progress.paused("the sampler does not answer")
            raise TimeoutError
        request = pb.DescribeRequestRequest(request_id=self._request_id)
        return (await replica.stub.DescribeRequest(request)).status

    @asynccontextmanager
    async def _watched(self, replica: Replica) -> AsyncIterator[Callable[[], None]]:
        """Watches the request while the replica has it in work, which is until the block ends. A suspect waits here for
        its turn.

        The block gets a function, and must call it at the first token. Raises NotReady when the replica is lost, and
        ServiceError when the request has killed two replicas or more.
        """
        mine, life = self._suspicion, replica.life
        async with life.work(mine) as begun:
            if life.is_over or replica.state != "serving":
                raise NotReady(f"the sampler at {replica.address} went away before it had the request")
            if self.is_suspect:
                await self._deaths_before()  # a request with this content may have been condemned meanwhile
            try:
                yield begun
            except NotReady as error:
                self._replicas.lost(replica)
                if not _is_death(error):
                    raise
                deaths = mine.deaths
                is_condemned = life.ends(mine)
                if mine.deaths > deaths and self._request is not None:
                    await self._suspects.note(await self._content_of(self._request), mine)
                if is_condemned:
                    raise _killer(mine, error) from error
                raise
            if self.is_suspect and self._request is not None:
                self._suspects.acquit(await self._content_of(self._request))


class Drawings:
    """The parts that the drawings of both APIs share. Counts their tokens."""

    def __init__(
        self,
        *,
        clients: Clients,
        publishing: Publishing,
        inflight: Inflight,
        suspects: Suspects,
        ledger: Ledger,
        recent: RecentSamples,
        metrics: Metrics,
    ) -> None:
        self.ledger = ledger
        self.recent = recent
        self.clients = clients
        self.publishing = publishing
        self.inflight = inflight
        self.suspects = suspects
        self._metrics = metrics

    def count(
        self,
        request: pb.SampleRequest,
        hold: Hold | None,
        *,
        num_cached: int,
        num_sampled: int,
        base_model: str,
        session_id: str = "",
        owner: str | None = None,
        key_id: str = "",
    ) -> int:
        """Counts the tokens of an answer, and releases its reservation. Owner and key as for `Ledger.use`. Returns the
        number of tokens in all."""
        num_prompt = num_tokens(request.prompt, self.clients.counting(base_model))
        submissions = self._metrics.submissions
        submissions.prompt_tokens.inc(num_prompt)
        submissions.cached_prompt_tokens.inc(num_cached)
        submissions.sampled_tokens.inc(num_sampled)
        use = partial(self.ledger.use, base_model=base_model, session_id=session_id, owner=owner, key_id=key_id)
        use("sampling_prefill", num_prompt - num_cached)
        use("sampling_prefill_cached", num_cached)
        use("sampling_sample", num_sampled)
        if hold is not None:
            hold.drawn(num_sampled)
            hold.release()  # the tokens are counted as used now, and must not count as reserved, too
        return num_prompt + num_sampled


def _is_death(error: NotReady) -> bool:
    """Whether the sampler's process or engine died. A dead engine says whether it was computing the request."""
    if isinstance(error, EngineDead):
        return error.metadata.get("computing") != "no"
    return isinstance(error, ConnectionLost)


def _killer(mine: Suspicion, error: NotReady | None = None) -> ServiceError:
    """The error of a request that is given to no further sampler. `error`: the error of the last sampler; None for a
    repeat of such a request."""
    level = logging.INFO if error is None else logging.ERROR
    logger.log(level, "a request is not given to another sampler: %d samplers died while they had it", mine.deaths)
    until = "" if mine.ends_at is None else f" until {time.strftime('%H:%M', time.gmtime(mine.ends_at))} UTC"
    last = "" if error is None else f" (the last one's error: {error.message})"
    return ServiceError(
        f"{mine.deaths} samplers ended while they computed this request, so it is not given to another{until}; the "
        f"samplers' logs have the cause{last}"
    )
