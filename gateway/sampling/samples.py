"""Samples, from submission to answer.

A sample is a call to a sampler, which replicas.py chooses. When the sampler goes away or is full, another one is tried;
when there is none, the sample waits. A version that no sampler holds is published by the trainer, once for all samples
that want it (publishing.py). A version that only some samplers hold is sampled there, and published to the others
meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio

from gateway import json_forms
from gateway.clients import Clients
from gateway.config import GatewayConfig
from gateway.dashboard.samples import RecentSamples
from gateway.database.outages import until_written
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import PROTOBUF, Answer, Futures, Pending, ran_of
from gateway.held import Share
from gateway.metrics import Metrics
from gateway.sampling.inflight import Inflight
from gateway.sampling.publishing import Publishing
from gateway.sampling.records import Records
from gateway.sampling.replicas import Replica
from gateway.sampling.tries import Tries
from gateway.tenants.ledger import Ledger
from gateway.tenants.limits import Hold
from gateway.turns import Turns
from tinsmith.rpc import logs
from tinsmith.rpc.errors import (
    CheckpointNotFound,
    NotReady,
    OutOfCapacity,
    SequenceConflict,
    ServiceError,
    VersionGone,
    VersionNotLoaded,
)
from tinsmith.rpc.paths import run_of
from tinsmith.v1 import sampler_pb2, types_pb2

KIND = "asample"


def check_pending(config: GatewayConfig, owner: str, *, num_own: int, num_all: int) -> None:
    """Raises OutOfCapacity when the samples in work, of the owner or of all owners, have reached their limit."""
    for number, limit, name, whose in (
        (num_own, config.max_pending_samples_per_owner, "max_pending_samples_per_owner", f" of {owner!r}"),
        (num_all, config.max_pending_samples, "max_pending_samples", ""),
    ):
        if number >= limit:
            raise OutOfCapacity(f"{limit} samples{whose} are in work, which is {name}; try again")


class Samples:
    """Runs samples of sampling sessions, each as a future."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        clients: Clients,
        futures: Futures,
        inflight: Inflight,
        records: Records,
        publishing: Publishing,
        ledger: Ledger,
        recent: RecentSamples,
        metrics: Metrics,
        turns: Turns,
    ) -> None:
        self._config = config
        self._publishing = publishing
        self._ledger = ledger
        self._recent = recent
        self._clients = clients
        self._futures = futures
        self._inflight = inflight
        self._records = records
        self._metrics = metrics
        self._turns = turns

    def check_capacity(self, owner: str) -> None:
        """Raises OutOfCapacity when too many samples are in work. It is cheap, so it is called before a body is
        read."""
        num_own = self._futures.num_pending(KIND, owner=owner)
        check_pending(self._config, owner, num_own=num_own, num_all=self._futures.num_pending(KIND))

    def submit(
        self,
        request_id: str,
        request: sampler_pb2.SampleRequest,
        *,
        session: SamplingSession,
        fingerprint: str,
        is_recorded: bool,
        hold: Hold | None = None,
        held: Share | None = None,
    ) -> None:
        """Starts a sample. A repeat does nothing. Raises SequenceConflict for another body under the same id.

        `is_recorded`: the sequences are stored, for losses that name them.
        """
        known = self._futures.fingerprint(request_id)
        if known is None:
            pending = Pending(request_id, KIND, session.sampling_session_id, fingerprint, hold=hold, held=held)
            self._futures.start(pending, self._run(pending, request, session, is_recorded=is_recorded))
        elif known != fingerprint:
            raise SequenceConflict(
                f"{request_id} was used by another sample before; this one has a different body and was not run"
            )

    async def _run(
        self, pending: Pending, request: sampler_pb2.SampleRequest, session: SamplingSession, *, is_recorded: bool
    ) -> Answer:
        logs.model_id.set(run_of(session.version_id))
        try:
            async with asyncio.timeout(self._config.sample_timeout_s):
                response = await self._sample(pending, request, session)
        except TimeoutError:
            raise ServiceError(
                f"gave up after {self._config.sample_timeout_s:g} s (sample_timeout_s): {pending.progress.reason}"
            ) from None
        await self._turns.take("" if pending.hold is None else pending.hold.owner)  # samples may end in bursts
        if is_recorded:

            async def record() -> None:
                await self._records.add(pending.request_id, request, response, session_id=session.session_id)

            await until_written(record, what=pending.request_id, pausing=pending.progress.paused)
        self._recent.add(
            pending.request_id,
            request,
            response.sequences,
            base_model=session.base_model,
            session_id=session.session_id,
        )
        num_prompt = sum(len(chunk.encoded_text.tokens) // 4 for chunk in request.prompt)
        num_sampled = sum(len(sequence.tokens) // 4 for sequence in response.sequences)
        self._metrics.submissions.prompt_tokens.inc(num_prompt)
        self._metrics.submissions.sampled_tokens.inc(num_sampled)
        pending.num_tokens = num_prompt + num_sampled
        num_cached = response.prompt_cache_hit_tokens
        self._metrics.submissions.cached_prompt_tokens.inc(num_cached)
        use = partial(self._ledger.use, base_model=session.base_model, session_id=session.session_id)
        use("sampling_prefill", num_prompt - num_cached)
        use("sampling_prefill_cached", num_cached)
        use("sampling_sample", num_sampled)
        if pending.hold is not None:
            pending.hold.drawn(num_sampled)
            pending.hold.release()  # the tokens are counted now; held as well, they would count twice
            if pending.hold.is_budgeted:
                await until_written(self._ledger.flush, what="the usage", pausing=pending.progress.paused)
        return Answer(response.SerializeToString(), PROTOBUF, json_forms.sample_result)

    async def _sample(
        self, pending: Pending, request: sampler_pb2.SampleRequest, session: SamplingSession
    ) -> sampler_pb2.SampleResponse:
        """Samples from the version that the session has now. Sets `version_id` and `follow_run` of the request."""
        tries = Tries(self._clients.samplers, session.base_model)
        while True:
            is_fixed = session.inflight_run_id is None
            drawn_from = session if is_fixed else await self._inflight.resolve(session)
            request.version_id = drawn_from.version_id
            request.follow_run = drawn_from.inflight_run_id or ""
            if not self._clients.samplers.usable(session.base_model):
                pending.progress.paused("the sampler is unreachable")
            replica = await tries.route(request)
            if self._clients.samplers.lacking(session.base_model, drawn_from.version_id):
                self._publishing.top_up(drawn_from)
            if tries.is_suspect:
                pending.progress.paused("a sampler died with this request in work; such requests run one at a time")
            try:
                async with tries.at(replica) as begun:
                    return await self._call(pending, request, replica, begun=begun if tries.is_suspect else None)
            except NotReady:
                self._clients.samplers.lost(replica)
                pending.progress.paused("the sampler is unreachable")
            except OutOfCapacity as error:
                pending.progress.paused(f"the sampler is full: {error.message}")
            except VersionNotLoaded:
                try:
                    if await self._provide(pending, drawn_from, replica):
                        await tries.provided()
                        continue
                except (CheckpointNotFound, VersionGone):
                    if (await self._inflight.resolve(session)).version_id == drawn_from.version_id:
                        raise
                    await tries.provided()
                    continue  # the run has a newer inflight version by now, and the older one is gone
            await tries.next()

    async def _call(
        self,
        pending: Pending,
        request: sampler_pb2.SampleRequest,
        replica: Replica,
        *,
        begun: Callable[[], None] | None,
    ) -> sampler_pb2.SampleResponse:
        """Calls the replica. `begun` is called at the first token; None: the first token is not awaited."""
        pending.progress.active("the sampler is working on it")
        pending.ask = lambda: _ask(replica, pending)
        if begun is None:
            call = replica.stub.Sample(request)
        else:
            call = replica.stub.StreamSample(sampler_pb2.StreamSampleRequest(request=request))
        try:
            with self._clients.samplers.holding(replica, call, weight=request.num_samples):
                response = await (call if begun is None else _last_of(call, begun))
            pending.ran = ran_of(await call.trailing_metadata())
            return response
        except ServiceError:
            pending.ran = ran_of(await call.trailing_metadata())
            raise
        finally:
            pending.ask = None

    async def _provide(self, pending: Pending, session: SamplingSession, replica: Replica) -> bool:
        pending.ask = lambda: self._publishing.describe(session.base_model, pending.progress)
        try:
            return await self._publishing.provide(session, replica, progress=pending.progress)
        finally:
            pending.ask = None


async def _last_of(call: Any, begun: Callable[[], None]) -> sampler_pb2.SampleResponse:
    """The result of a stream. Calls `begun` at each piece; the first one says that the sampler has begun."""
    result = sampler_pb2.SampleResponse()
    try:
        while (piece := await call.read()) is not grpc.aio.EOF:
            begun()
            result = piece.result
    finally:
        call.cancel()
    return result


async def _ask(replica: Replica, pending: Pending) -> types_pb2.QueueStatus:
    """Asks the replica what the request waits for. Raises TimeoutError at once when the replica is
    unhealthy."""
    if replica.state != "serving":
        pending.progress.paused("the sampler does not answer")
        raise TimeoutError
    request = sampler_pb2.DescribeRequestRequest(request_id=pending.request_id)
    return (await replica.stub.DescribeRequest(request)).status
