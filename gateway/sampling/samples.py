"""Samples of sampling sessions, from submission to answer. drawing.py finds a sampler for each."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial

from gateway import json_forms
from gateway.clients import Clients
from gateway.config import GatewayConfig
from gateway.dashboard.samples import RecentSamples
from gateway.database.outages import until_written
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import PROTOBUF, Answer, Futures, Pending
from gateway.held import Share
from gateway.metrics import Metrics
from gateway.sampling.drawing import Drawing
from gateway.sampling.inflight import Inflight
from gateway.sampling.publishing import Publishing
from gateway.sampling.records import Records
from gateway.tenants.ledger import Ledger
from gateway.tenants.limits import Hold
from gateway.turns import Turns
from tinsmith.errors import OutOfCapacity, SequenceConflict, ServiceError
from tinsmith.rpc import logs
from tinsmith.rpc.paths import run_of
from tinsmith.v1 import sampler_pb2

KIND = "asample"


class Places:
    """The samples in work, of both APIs, against their limits."""

    def __init__(self, config: GatewayConfig, futures: Futures) -> None:
        self._config = config
        self._futures = futures
        self._prompts: Counter[str] = Counter()
        """owner -> prompts of the OpenAI API in work."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts of the OpenAI API in work."""
        return self._prompts.total()

    def check(self, owner: str) -> None:
        """Raises OutOfCapacity when the samples in work, of the owner or of all owners, have reached their limit. It is
        cheap, so it is called before a body is read."""
        config, futures = self._config, self._futures
        num_own = futures.num_pending(KIND, owner=owner) + self._prompts[owner]
        for number, limit, name, whose in (
            (num_own, config.max_pending_samples_per_owner, "max_pending_samples_per_owner", f" of {owner!r}"),
            (futures.num_pending(KIND) + self.num_prompts, config.max_pending_samples, "max_pending_samples", ""),
        ):
            if number >= limit:
                raise OutOfCapacity(f"{limit} samples{whose} are in work, which is {name}; try again")

    @contextlib.contextmanager
    def hold(self, owner: str, *, num_prompts: int = 1) -> Iterator[None]:
        """Counts prompts of the OpenAI API as samples in work, from before they are rendered to the end of the answer.
        Raises what `check` raises."""
        self.check(owner)
        self._prompts[owner] += num_prompts
        try:
            yield
        finally:
            self._prompts[owner] -= num_prompts
            if not self._prompts[owner]:
                del self._prompts[owner]


def count_tokens(
    metrics: Metrics,
    ledger: Ledger,
    hold: Hold | None,
    *,
    num_prompt: int,
    num_cached: int,
    num_sampled: int,
    base_model: str,
    session_id: str = "",
    owner: str | None = None,
    key_id: str = "",
) -> None:
    """Counts the tokens of an answer, and releases its reservation. Owner and key as for `Ledger.use`."""
    metrics.submissions.prompt_tokens.inc(num_prompt)
    metrics.submissions.cached_prompt_tokens.inc(num_cached)
    metrics.submissions.sampled_tokens.inc(num_sampled)
    use = partial(ledger.use, base_model=base_model, session_id=session_id, owner=owner, key_id=key_id)
    use("sampling_prefill", num_prompt - num_cached)
    use("sampling_prefill_cached", num_cached)
    use("sampling_sample", num_sampled)
    if hold is not None:
        hold.drawn(num_sampled)
        hold.release()  # the tokens are counted now; held as well, they would count twice


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
        drawing = Drawing(
            session,
            request,
            clients=self._clients,
            publishing=self._publishing,
            inflight=self._inflight,
            request_id=pending.request_id,
            progress=pending.progress,
        )
        pending.ask = drawing.describe
        try:
            async with asyncio.timeout(self._config.sample_timeout_s):
                response = await drawing.run(drawing.sample)
        except TimeoutError:
            raise ServiceError(
                f"gave up after {self._config.sample_timeout_s:g} s (sample_timeout_s): {pending.progress.reason}"
            ) from None
        finally:
            pending.ran = drawing.ran
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
        pending.num_tokens = num_prompt + num_sampled
        count_tokens(
            self._metrics,
            self._ledger,
            pending.hold,
            num_prompt=num_prompt,
            num_cached=response.prompt_cache_hit_tokens,
            num_sampled=num_sampled,
            base_model=session.base_model,
            session_id=session.session_id,
        )
        if pending.hold is not None and pending.hold.is_budgeted:
            await until_written(self._ledger.flush, what="the usage", pausing=pending.progress.paused)
        return Answer(response.SerializeToString(), PROTOBUF, json_forms.sample_result)
