"""Samples of sampling sessions, from submission to answer (`Samples`), and which of them are done (`Completions`).
drawing.py finds a sampler for each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway import json_forms
from gateway.config import GatewayConfig
from gateway.database.outages import until_written
from gateway.database.store import Store
from gateway.database.tables.samples import SampleMark
from gateway.database.tables.sessions import SamplingSession
from gateway.futures import Answer, Futures, Gone, Pending
from gateway.ids import LAST_SEQ_ID, Target, first_of, sample_of
from gateway.load import Pacer, Share
from gateway.sampling.drawing import Drawing, Drawings
from gateway.sampling.records import Records
from gateway.tenants.limits import Hold
from tinsmith.errors import InvalidRequest, NotReady, OutOfCapacity, SequenceConflict, ServiceError
from tinsmith.rpc import logs
from tinsmith.rpc.paths import run_of
from tinsmith.tasks import set_within
from tinsmith.v1 import sampler_pb2

KIND = "asample"

MAX_PAGE = 1000
"""Most completions in one answer."""
_MARKED_AHEAD = 256
"""The range in the database is extended by this many seq_ids at a time, so most samples cost no write."""
_MAX_LISTS = 1024
"""Most lists of completions in memory."""
_MAX_TARGETS = 16_384
"""Most targets in memory. A forgotten one is rebuilt from the range in the database."""
_ELSEWHERE_S = 1.0
"""Longest poll for a client without samples when there are several gateways, in seconds."""
_MAX_OPEN = 100_000
"""Most samples of a target whose completion the client may wait for, and most completions in a list."""
_MAX_SETTLED = 4096
"""Most samples of a target that are remembered as settled."""
_KEPT = MAX_PAGE
"""Number of confirmed completions that are still kept, in case the client asks for them again."""


class SamplePlaces:
    """Holds the samples in work, of both APIs together, within their limits."""

    def __init__(self, config: GatewayConfig, futures: Futures) -> None:
        self._config = config
        self._futures = futures
        self._prompts: Counter[str] = Counter()
        """owner -> prompts of the OpenAI API in work."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts of the OpenAI API in work."""
        return self._prompts.total()

    def check(self, owner: str, *, num_prompts: int = 1) -> None:
        """Raises OutOfCapacity when there is no place for so many more samples, because the samples in work of the
        owner, and of all owners, are bounded. Raises InvalidRequest for more prompts than there are places in all. The
        check is cheap, so it is made before a body is read."""
        config, futures = self._config, self._futures
        num_own = futures.num_pending(KIND, owner=owner) + self._prompts[owner]
        for number, limit, name, whose in (
            (num_own, config.max_pending_samples_per_owner, "max_pending_samples_per_owner", f" of {owner!r}"),
            (futures.num_pending(KIND) + self.num_prompts, config.max_pending_samples, "max_pending_samples", ""),
        ):
            if num_prompts > limit:
                raise InvalidRequest(
                    f"prompt: {num_prompts} prompts are more than this server has places for samples, {name} {limit}; "
                    "send them in several requests",
                    field="prompt",
                )
            if number >= limit:
                raise OutOfCapacity(f"{limit} samples{whose} are in work, which is {name}; try again")
            if number + num_prompts > limit:
                too_many = f"{num_prompts} more would be above {name} {limit}"
                raise OutOfCapacity(f"{number} samples{whose} are in work, and {too_many}; try again")

    @contextlib.contextmanager
    def hold(self, owner: str, *, num_prompts: int = 1) -> Iterator[None]:
        """A context that counts prompts of the OpenAI API as samples in work. It lasts from before the prompts are
        rendered to the end of the answer. Raises the errors of `check`."""
        self.check(owner, num_prompts=num_prompts)
        self._prompts[owner] += num_prompts
        try:
            yield
        finally:
            self._prompts[owner] -= num_prompts
            if not self._prompts[owner]:
                del self._prompts[owner]


class Samples:
    """Runs samples of sampling sessions, each as a future."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        drawings: Drawings,
        futures: Futures,
        records: Records,
        pacer: Pacer,
    ) -> None:
        self._config = config
        self._drawings = drawings
        self._futures = futures
        self._records = records
        self._pacer = pacer

    def submit(
        self,
        request_id: str,
        request: sampler_pb2.SampleRequest,
        *,
        session: SamplingSession,
        fingerprint: str,
        is_recorded: bool,
        hold: Hold | None = None,
        body_share: Share | None = None,
    ) -> None:
        """Starts a sample. A repeat does nothing. Raises SequenceConflict for another body under the same id.

        `is_recorded`: True if the sequences are to be stored, for losses that name them.
        """
        known = self._futures.fingerprint(request_id)
        if known is None:
            pending = Pending(
                request_id, KIND, session.sampling_session_id, fingerprint, hold=hold, body_share=body_share
            )
            self._futures.start(pending, self._run(pending, request, session, is_recorded=is_recorded))
        elif known != fingerprint:
            raise SequenceConflict(
                f"{request_id} was used by another sample before; this one has a different body and was not run"
            )

    async def _run(
        self, pending: Pending, request: sampler_pb2.SampleRequest, session: SamplingSession, *, is_recorded: bool
    ) -> Answer:
        logs.model_id.set(run_of(session.version_id))
        drawing = Drawing(self._drawings, session, request, request_id=pending.request_id, progress=pending.progress)
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
        await self._pacer.turn("" if pending.hold is None else pending.hold.owner)  # samples may end in bursts
        if is_recorded:

            async def record() -> None:
                await self._records.add(pending.request_id, request, response, session_id=session.session_id)

            await until_written(record, what=pending.request_id, pausing=pending.progress.paused)
        self._drawings.recent.add(
            pending.request_id,
            request,
            response.sequences,
            base_model=session.base_model,
            session_id=session.session_id,
        )
        pending.num_tokens = self._drawings.count(
            request,
            pending.hold,
            num_cached=response.prompt_cache_hit_tokens,
            num_sampled=sum(len(sequence.tokens) // 4 for sequence in response.sequences),
            base_model=session.base_model,
            session_id=session.session_id,
        )
        if pending.hold is not None and pending.hold.is_budgeted:
            await until_written(self._drawings.ledger.flush, what="the usage", pausing=pending.progress.paused)
        return Answer(response.SerializeToString(), json_forms.sample_result)


# Completions


@dataclass(slots=True)
class _TargetSamples:
    """The samples of one target."""

    low: int
    high: int
    """Smallest and largest seq_id of the range in the database."""
    open: dict[int, None] = field(default_factory=dict)
    """seq_ids whose completion the client may still wait for, in order of arrival."""
    settled: dict[int, None] = field(default_factory=dict)
    """The latest seq_ids whose completion the client no longer waits for."""
    polled_s: float = field(default_factory=time.monotonic)
    """Time of the last poll for all of them, by time.monotonic; at first, the time since which they are in memory."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _CompletionList:
    """The completions of a target, from position `start` on."""

    start: int
    request_ids: list[str]
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False
    """True when the sampling session has ended."""

    @property
    def end(self) -> int:
        return self.start + len(self.request_ids)

    def add(self, request_id: str) -> None:
        self.request_ids.append(request_id)
        self.grown.set()

    def trim(self, *, confirmed: int) -> None:
        if (num_kept := confirmed - self.start) > 2 * _KEPT:
            del self.request_ids[: num_kept - _KEPT]
            self.start = confirmed - _KEPT


class Completions:
    """Completions for retrieve_futures: which samples of a client are done. A client polls for all its samples at once.

    A target is one client of a sampling session: its samples have the seq_ids with seq_id // 10**9 equal to its clone
    id. Its completions are a growing list. The client sends the position up to which it has them, so a lost answer can
    be asked for again.

    The list can be rebuilt at any time from the samples that are not in work, so it may be forgotten. A restarted
    gateway rebuilds it, too: the database has the range of seq_ids, and samples that were in work at the restart are
    reported as failed. The client asks for each of those with retrieve_future, gets 410, and samples again. A sample
    that is wrongly reported does no harm, because retrieve_future waits for work that exists.
    """

    def __init__(self, store: Store, futures: Futures, *, home: str | None) -> None:
        """`home`: this gateway's id when there are several gateways (high_availability/), else None."""
        self._store = store
        self._futures = futures
        self._home = home
        self._samples: OrderedDict[Target, _TargetSamples] = OrderedDict()
        """Targets in memory, the least recently used first."""
        self._lists: OrderedDict[Target, _CompletionList] = OrderedDict()
        self._closing = False
        futures.listener = self

    async def reserve(self, request_id: str) -> None:
        """Notes a sample in the database. Must be awaited before its receipt, so that a restart cannot hide its loss.

        Raises NotReady when another gateway has taken over the target.
        """
        if (found := sample_of(request_id)) is None:
            return
        target, seq_id = found
        samples = await self._load(target)
        samples.settled.pop(seq_id, None)
        samples.open[seq_id] = None
        while len(samples.open) > _MAX_OPEN:  # abandoned by the client; never so many are in work
            del samples.open[next(iter(samples.open))]
        if not samples.low <= seq_id <= samples.high:  # seq_ids arrive in any order
            async with samples.lock:
                if not samples.low <= seq_id <= samples.high:
                    low = min(samples.open, default=seq_id)
                    high = max(samples.high, min(seq_id + _MARKED_AHEAD, LAST_SEQ_ID))
                    mark = SampleMark(sampling_session_id=target[0], clone_id=target[1], low=low, high=high)
                    if not await self._store.samplers.put_mark(mark, home=self._home):
                        raise NotReady("another gateway has taken over these samples; try again")
                    samples.low, samples.high = low, high

    async def _load(self, target: Target) -> _TargetSamples:
        """The samples of a target. After a restart, all samples that may have been in work are open."""
        if target not in self._samples:
            mark = await self._store.samplers.mark(*target)
            if target not in self._samples:
                first = first_of(target[1])
                low, high = (first, first - 1) if mark is None else (mark.low, mark.high)
                lost = range(max(low, high - _MAX_OPEN), high + 1)
                self._samples[target] = _TargetSamples(low, high, dict.fromkeys(lost))
                self._make_room()
        self._samples.move_to_end(target)
        return self._samples[target]

    def _make_room(self) -> None:
        while len(self._samples) > _MAX_TARGETS:
            oldest, samples = next(iter(self._samples.items()))
            if samples.lock.locked():  # `reserve` is writing its range
                self._samples.move_to_end(oldest)
                return
            del self._samples[oldest]

    def settle(self, request_ids: Iterable[str]) -> None:
        """Notes samples that the client has asked for, has received, or has given up. A new list leaves out failures of
        these samples."""
        for request_id in request_ids:
            if (found := sample_of(request_id)) is not None and found[0] in self._samples:
                samples, seq_id = self._samples[found[0]], found[1]
                if seq_id in samples.open:
                    del samples.open[seq_id]
                    samples.settled[seq_id] = None
                if len(samples.settled) > _MAX_SETTLED:
                    del samples.settled[next(iter(samples.settled))]

    def cancelled(self, of: Callable[[str], bool]) -> None:
        """Ends the polls of the sampling sessions whose id `of` accepts, and frees their memory."""
        for target in [target for target in self._samples if of(target[0])]:
            del self._samples[target]
        for target in [target for target in self._lists if of(target[0])]:
            completions = self._lists.pop(target)
            completions.has_ended = True
            completions.grown.set()

    def forget(self, target: Target) -> None:
        """Forgets a target, because another gateway may have changed it in the database."""
        self._samples.pop(target, None)
        if (completions := self._lists.pop(target, None)) is not None:
            completions.grown.set()

    def rouse(self) -> None:
        """Answers all polls now."""
        for completions in self._lists.values():
            completions.grown.set()

    def ended(self, request_id: str, target: Target) -> None:
        if (completions := self._lists.get(target)) is not None:
            completions.add(request_id)
            if len(completions.request_ids) > _MAX_OPEN:  # the client does not read it
                del self._lists[target]

    async def poll(self, target: Target, *, prev_cursor: int, timeout_s: float) -> tuple[list[dict[str, Any]], int]:
        """Waits for completions after position `prev_cursor`. Returns them, and the position after the last one.

        Returns none after `timeout_s`. Raises Gone when the sampling session ends meanwhile.
        """
        is_new = target not in self._samples and await self._store.samplers.mark(*target) is None
        if is_new and target not in self._samples:  # its first sample may have come, and ended, meanwhile
            return await self._poll_new(target, prev_cursor=prev_cursor, timeout_s=timeout_s)
        completions = await self._list(target, prev_cursor=prev_cursor)
        return await self._page(completions, prev_cursor=prev_cursor, timeout_s=timeout_s)

    async def _poll_new(
        self, target: Target, *, prev_cursor: int, timeout_s: float
    ) -> tuple[list[dict[str, Any]], int]:
        """Polls for a client without samples. Only the list is kept, and only during the poll, because a caller can
        make up any number of clients."""
        if self._home is not None:  # the first sample may arrive at another gateway, which this one does not notice
            timeout_s = min(timeout_s, _ELSEWHERE_S)
        completions = self._lists.setdefault(target, _CompletionList(prev_cursor, []))
        try:
            return await self._page(completions, prev_cursor=prev_cursor, timeout_s=timeout_s)
        finally:
            if target not in self._samples and self._lists.get(target) is completions:
                del self._lists[target]

    async def _page(
        self, completions: _CompletionList, *, prev_cursor: int, timeout_s: float
    ) -> tuple[list[dict[str, Any]], int]:
        completions.trim(confirmed=prev_cursor)
        position = max(prev_cursor, completions.start)
        if position == completions.end and timeout_s > 0 and not self._closing:
            completions.grown.clear()
            await set_within(completions.grown, timeout_s)
            if completions.has_ended:
                raise Gone
            position = max(prev_cursor, completions.start)
        page = completions.request_ids[position - completions.start :][:MAX_PAGE]
        return [self._completion(request_id) for request_id in page], position + len(page)

    async def _list(self, target: Target, *, prev_cursor: int) -> _CompletionList:
        samples = await self._load(target)
        samples.polled_s = time.monotonic()
        completions = self._lists.get(target)
        if completions is None or prev_cursor > completions.end:
            settled = [f"{target[0]}:{seq_id}" for seq_id in samples.settled]
            over = [request_id for request_id in settled if self._futures.answer(request_id) is not None]
            waited_for = [f"{target[0]}:{seq_id}" for seq_id in samples.open]
            over += [request_id for request_id in waited_for if self._futures.pending(request_id) is None]
            completions = self._lists[target] = _CompletionList(prev_cursor, over)
            if len(self._lists) > _MAX_LISTS:
                self._lists.popitem(last=False)[1].grown.set()
        self._lists.move_to_end(target)
        return completions

    def _completion(self, request_id: str) -> dict[str, Any]:
        answer = self._futures.answer(request_id)
        if answer is None or answer.is_failure:
            return {"state": "failed", "request_id": request_id}
        return {
            "state": "finished",
            "request_id": request_id,
            "response_payload_uncompressed_size": len(answer.body),
        }

    def polled_s(self, target: Target) -> float:
        """Time of the client's last poll for all its samples, by time.monotonic; 0 when it is not known."""
        samples = self._samples.get(target)
        return 0.0 if samples is None else samples.polled_s

    def closing(self) -> None:
        """Answers all polls now, and later polls without waiting."""
        self._closing = True
        self.rouse()
