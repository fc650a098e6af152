"""Samples, from submission to answer.

A sample is a call to a sampler. One that goes away, or is full, is waited for; a version that it does not hold is
published to it by the trainer, once for all samples that want it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

import grpc.aio

from gateway import json_forms
from gateway.clients import Clients, Sampler, is_lost
from gateway.config import GatewayConfig
from gateway.futures import PROTOBUF, Answer, Futures, Pending, Progress
from gateway.inflight import Inflight
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.records import Records
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


@dataclass(slots=True)
class Pause:
    """Grows with every try in vain."""

    next_s: float = 0.1

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s)
        self.next_s = min(2 * self.next_s, 2.0)


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
        pause = Pause()
        while True:
            drawn_from = await self._inflight.resolve(session)
            request.version_id = drawn_from.version_id
            try:
                return await self._call(pending, request, base_model=session.base_model)
            except NotReady:
                pending.progress.paused("the sampler is unreachable")
            except OutOfCapacity as error:
                pending.progress.paused(f"the sampler is full: {error.message}")
            except VersionNotLoaded:
                try:
                    if await self.publish(drawn_from, progress=pending.progress):
                        continue
                except (CheckpointNotFound, VersionGone):
                    if (await self._inflight.resolve(session)).version_id == drawn_from.version_id:
                        raise
                    continue  # an inflight sampler has moved on, and what it has left is gone
            await pause.wait()

    async def _call(
        self, pending: Pending, request: sampler_pb2.SampleRequest, *, base_model: str
    ) -> sampler_pb2.SampleResponse:
        if (sampler := self._clients.find_sampler(base_model)) is None:
            pending.progress.paused("the sampler is unreachable")
            sampler = await self._clients.sampler(base_model)
        pending.progress.active("the sampler is working on it")
        pending.ask = lambda: _ask(sampler, pending.request_id)
        sampler.num_running += 1
        try:
            call = sampler.stub.Sample(request, metadata=((REQUEST_ID_METADATA, pending.request_id),))
            response = await call
            pending.ran = ran_of(await call.trailing_metadata())
            return response
        except grpc.aio.AioRpcError as error:
            pending.ran = ran_of(error.trailing_metadata())
            raise NotReady(error.details() or "") if is_lost(error) else from_rpc_error(error) from error
        finally:
            pending.ask = None
            sampler.num_running -= 1

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


async def _ask(sampler: Sampler, request_id: str) -> types_pb2.QueueStatus:
    reply = await sampler.stub.DescribeRequest(sampler_pb2.DescribeRequestRequest(request_id=request_id))
    return reply.status
