"""Samples, from submission to answer.

A sample is a call to a sampler. One that goes away, or is full, is waited for; a version that it does not hold is
published to it by the trainer, once for all samples that want it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc.aio

from gateway import json_forms
from gateway.clients import Clients, is_lost
from gateway.config import GatewayConfig
from gateway.futures import PROTOBUF, Answer, Futures, Pending, Progress
from gateway.metrics import Metrics
from gateway.tables import SamplingSession
from tinsmith.rpc.errors import (
    FailedPrecondition,
    NotReady,
    OutOfCapacity,
    SequenceConflict,
    ServiceError,
    VersionNotLoaded,
    from_rpc_error,
)
from tinsmith.rpc.logs import REQUEST_ID_METADATA
from tinsmith.v1 import sampler_pb2, trainer_pb2

logger = logging.getLogger(__name__)

KIND = "asample"


@dataclass(slots=True)
class _Pause:
    """Grows with every try in vain."""

    next_s: float = 0.1

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s)
        self.next_s = min(2 * self.next_s, 2.0)


class Samples:
    def __init__(self, config: GatewayConfig, *, clients: Clients, futures: Futures, metrics: Metrics) -> None:
        self._config = config
        self._clients = clients
        self._futures = futures
        self._metrics = metrics
        self._publishing: dict[str, asyncio.Task[None]] = {}

    def check_capacity(self) -> None:
        """Raises OutOfCapacity when too many samples are in work; cheap, to be asked before the body is read."""
        if self._futures.num_pending(KIND) >= self._config.max_pending_samples:
            raise OutOfCapacity(
                f"{self._config.max_pending_samples} samples are in work, which is max_pending_samples; try again"
            )

    def submit(
        self, request_id: str, request: sampler_pb2.SampleRequest, *, session: SamplingSession, fingerprint: str
    ) -> None:
        """Starts it. A repeat does nothing; raises SequenceConflict for another body under the same id."""
        known = self._futures.fingerprint(request_id)
        if known is None:
            pending = Pending(request_id, KIND, session.sampling_session_id, fingerprint)
            self._futures.start(pending, self._run(pending, request, session))
        elif known != fingerprint:
            raise SequenceConflict(
                f"{request_id} was used by another sample before; this one has a different body and was not run"
            )

    async def _run(self, pending: Pending, request: sampler_pb2.SampleRequest, session: SamplingSession) -> Answer:
        try:
            async with asyncio.timeout(self._config.sample_timeout_s):
                response = await self._sample(pending, request, session)
        except TimeoutError:
            raise ServiceError(
                f"gave up after {self._config.sample_timeout_s:g} s (sample_timeout_s): {pending.progress.reason}"
            ) from None
        self._metrics.prompt_tokens.inc(sum(len(chunk.encoded_text.tokens) // 4 for chunk in request.prompt))
        self._metrics.sampled_tokens.inc(sum(len(sequence.tokens) // 4 for sequence in response.sequences))
        return Answer(response.SerializeToString(), PROTOBUF, json_forms.sample_result)

    async def _sample(
        self, pending: Pending, request: sampler_pb2.SampleRequest, session: SamplingSession
    ) -> sampler_pb2.SampleResponse:
        pause = _Pause()
        while True:
            try:
                return await self._call(pending, request, base_model=session.base_model)
            except NotReady:
                pending.progress.paused("the sampler is unreachable")
            except OutOfCapacity as error:
                pending.progress.paused(f"the sampler is full: {error.message}")
            except VersionNotLoaded:
                if await self._publish(session, progress=pending.progress):
                    continue
            await pause.wait()

    async def _call(
        self, pending: Pending, request: sampler_pb2.SampleRequest, *, base_model: str
    ) -> sampler_pb2.SampleResponse:
        if (sampler := self._clients.find_sampler(base_model)) is None:
            pending.progress.paused("the sampler is unreachable")
            sampler = await self._clients.sampler(base_model)
        pending.progress.active("the sampler is working on it")
        sampler.num_running += 1
        try:
            return await sampler.stub.Sample(request, metadata=((REQUEST_ID_METADATA, pending.request_id),))
        except grpc.aio.AioRpcError as error:
            raise NotReady(error.details() or "") if is_lost(error) else from_rpc_error(error) from error
        finally:
            sampler.num_running -= 1

    async def _publish(self, session: SamplingSession, *, progress: Progress) -> bool:
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
        trainer = await self._clients.trainer(session.base_model)
        request = trainer_pb2.PublishCheckpointRequest(location=session.location, version_id=session.version_id)
        try:
            await trainer.stub.PublishCheckpoint(request)
        except grpc.aio.AioRpcError as error:
            raise NotReady("the trainer is unreachable") if is_lost(error) else from_rpc_error(error) from error
        logger.info("published %s of %s again", session.version_id, session.location)
