"""Samples, from submission to answer.

A sample is a call to a sampler (replicas.py chooses which). When that goes away, or is full, another is tried, and when
there is none it is waited for. A version that none holds is published to them by the trainer, once for all samples that
want it; one that only some hold is sampled there, and meanwhile published to the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial

import grpc.aio

from gateway import json_forms
from gateway.clients import Clients, is_lost
from gateway.config import GatewayConfig
from gateway.futures import PROTOBUF, Answer, Futures, Pending, Progress
from gateway.inflight import Inflight
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.records import Records
from gateway.replicas import Replica, Replicas
from gateway.reports import ran_of
from gateway.retirement import Retirement
from gateway.tables import SamplingSession
from tinsmith.rpc.errors import (
    CheckpointNotFound,
    FailedPrecondition,
    NotReady,
    OutOfCapacity,
    SequenceConflict,
    ServiceError,
    VersionGone,
    VersionNotLoaded,
    from_rpc_error,
)
from tinsmith.rpc.logs import REQUEST_ID_METADATA
from tinsmith.v1 import sampler_pb2, trainer_pb2, types_pb2

logger = logging.getLogger(__name__)

KIND = "asample"
_TOP_UP_S = 10.0
"""Between two attempts to give a version to those that lack it; twice that after another one so soon, and so on: they
may have no room for all that is sampled."""
_MAX_TOP_UP_S = 600.0
_MAX_TOPPED_UP = 4096


@dataclass(slots=True)
class Pause:
    """Grows with every try in vain."""

    next_s: float = 0.1

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s)
        self.next_s = min(2 * self.next_s, 2.0)


class Tries:
    """Where one request goes, try after try: to another replica at once, and when all were tried, after a pause."""

    def __init__(self, replicas: Replicas, base_model: str) -> None:
        self._replicas = replicas
        self._base_model = base_model
        self._replica: Replica | None = None
        self._in_vain: set[Replica] = set()
        self._pause = Pause()

    async def route(self, request: sampler_pb2.SampleRequest | None) -> Replica:
        self._replica = await self._replicas.route(self._base_model, request, avoid=self._in_vain)
        return self._replica

    async def next(self) -> None:
        """The last try was in vain."""
        if self._replica is not None:
            self._in_vain.add(self._replica)
        if self._in_vain.issuperset(self._replicas.usable(self._base_model)):
            self._in_vain.clear()
            await self._pause.wait()


class Samples:
    def __init__(
        self,
        config: GatewayConfig,
        *,
        clients: Clients,
        futures: Futures,
        inflight: Inflight,
        records: Records,
        retirement: Retirement,
        ledger: Ledger,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._retirement = retirement
        self._ledger = ledger
        self._clients = clients
        self._futures = futures
        self._inflight = inflight
        self._records = records
        self._metrics = metrics
        self._publishing: dict[str, asyncio.Task[None]] = {}
        self._topped_up: dict[str, tuple[float, float]] = {}
        """When a version was last published to those that lacked it, and for how long it is not again."""
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def check_capacity(self) -> None:
        """Raises OutOfCapacity when too many samples are in work; cheap, to be asked before the body is read."""
        if self._futures.num_pending(KIND) >= self._config.max_pending_samples:
            raise OutOfCapacity(
                f"{self._config.max_pending_samples} samples are in work, which is max_pending_samples; try again"
            )

    def submit(
        self,
        request_id: str,
        request: sampler_pb2.SampleRequest,
        *,
        session: SamplingSession,
        fingerprint: str,
        is_recorded: bool,
    ) -> None:
        """Starts it. A repeat does nothing; raises SequenceConflict for another body under the same id.

        `is_recorded`: what is sampled is kept for losses that name its sequences.
        """
        known = self._futures.fingerprint(request_id)
        if known is None:
            pending = Pending(request_id, KIND, session.sampling_session_id, fingerprint)
            self._futures.start(pending, self._run(pending, request, session, is_recorded=is_recorded))
        elif known != fingerprint:
            raise SequenceConflict(
                f"{request_id} was used by another sample before; this one has a different body and was not run"
            )

    async def _run(
        self, pending: Pending, request: sampler_pb2.SampleRequest, session: SamplingSession, *, is_recorded: bool
    ) -> Answer:
        try:
            async with asyncio.timeout(self._config.sample_timeout_s):
                response = await self._sample(pending, request, session)
        except TimeoutError:
            raise ServiceError(
                f"gave up after {self._config.sample_timeout_s:g} s (sample_timeout_s): {pending.progress.reason}"
            ) from None
        if is_recorded:
            await self._records.add(pending.request_id, request, response, session_id=session.session_id)
        num_prompt = sum(len(chunk.encoded_text.tokens) // 4 for chunk in request.prompt)
        num_sampled = sum(len(sequence.tokens) // 4 for sequence in response.sequences)
        self._metrics.prompt_tokens.inc(num_prompt)
        self._metrics.sampled_tokens.inc(num_sampled)
        pending.num_tokens = num_prompt + num_sampled
        num_cached = response.prompt_cache_hit_tokens
        use = partial(self._ledger.use, base_model=session.base_model, session_id=session.session_id)
        use("sampling_prefill", num_prompt - num_cached)
        use("sampling_prefill_cached", num_cached)
        use("sampling_sample", num_sampled)
        return Answer(response.SerializeToString(), PROTOBUF, json_forms.sample_result)

    async def _sample(
        self, pending: Pending, request: sampler_pb2.SampleRequest, session: SamplingSession
    ) -> sampler_pb2.SampleResponse:
        """Draws from the version that the session has now, and sets it in the request."""
        tries = Tries(self._clients.samplers, session.base_model)
        while True:
            drawn_from = await self._inflight.resolve(session)
            request.version_id = drawn_from.version_id
            request.follow_run = drawn_from.inflight_run_id or ""
            if not self._clients.samplers.usable(session.base_model):
                pending.progress.paused("the sampler is unreachable")
            replica = await tries.route(request)
            self.top_up(drawn_from)
            try:
                return await self._call(pending, request, replica)
            except NotReady:
                self._clients.samplers.lost(replica)
                pending.progress.paused("the sampler is unreachable")
            except OutOfCapacity as error:
                pending.progress.paused(f"the sampler is full: {error.message}")
            except VersionNotLoaded:
                try:
                    if await self.provide(drawn_from, replica, progress=pending.progress):
                        continue
                except (CheckpointNotFound, VersionGone):
                    if (await self._inflight.resolve(session)).version_id == drawn_from.version_id:
                        raise
                    continue  # an inflight sampler has moved on, and what it has left is gone
            await tries.next()

    async def _call(
        self, pending: Pending, request: sampler_pb2.SampleRequest, replica: Replica
    ) -> sampler_pb2.SampleResponse:
        pending.progress.active("the sampler is working on it")
        pending.ask = lambda: _ask(replica, pending)
        try:
            call = replica.stub.Sample(request, metadata=((REQUEST_ID_METADATA, pending.request_id),))
            with self._clients.samplers.holding(replica, call, weight=request.num_samples):
                response = await call
            pending.ran = ran_of(await call.trailing_metadata())
            return response
        except grpc.aio.AioRpcError as error:
            pending.ran = ran_of(error.trailing_metadata())
            raise NotReady(error.details() or "") if is_lost(error) else from_rpc_error(error) from error
        finally:
            pending.ask = None

    async def provide(self, session: SamplingSession, replica: Replica, *, progress: Progress) -> bool:
        """After VERSION_NOT_LOADED from a replica: True once one is known to hold the session's version, published if
        need be; False when none can have it now. Raises what the trainer says when it never will."""
        samplers = self._clients.samplers
        replica.versions.discard(session.version_id)
        if samplers.lacking(session.base_model, session.version_id):
            return True  # others hold it
        if not await self.publish(session, progress=progress):
            return False
        await samplers.list_versions(session.base_model)
        usable = samplers.usable(session.base_model)
        return any(session.version_id in replica.versions for replica in usable)

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
        """Has the trainer send the session's version to the samplers; False when it cannot now.

        Raises what the trainer says when it never will.
        """
        progress.active("publishing the weights to the sampler")
        version_id = session.version_id
        if not version_id:
            raise FailedPrecondition("the sampler does not hold the base model that it names")
        if version_id not in self._publishing:
            task = asyncio.create_task(self._publish_once(session))
            self._publishing[version_id] = task
            task.add_done_callback(lambda _: self._publishing.pop(version_id))
        try:
            await asyncio.shield(self._publishing[version_id])
        except (NotReady, OutOfCapacity) as error:
            progress.paused(f"the weights cannot be published now: {error.message}")
            return False
        return True

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
            raise NotReady("the trainer is unreachable") if is_lost(error) else from_rpc_error(error) from error
        logger.info("published %s of %s again", session.version_id, location)


async def _ask(replica: Replica, pending: Pending) -> types_pb2.QueueStatus:
    """Raises TimeoutError at once where nothing answers."""
    if replica.state != "serving":
        pending.progress.paused("the sampler does not answer")
        raise TimeoutError
    request = sampler_pb2.DescribeRequestRequest(request_id=pending.request_id)
    return (await replica.stub.DescribeRequest(request)).status
