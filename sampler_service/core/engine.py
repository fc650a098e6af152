"""The interface of an engine that generates, and the open requests, which both engines are composed of, beside the
versions."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import abc
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from sampler_service import large
from sampler_service.config import SamplerConfig
from sampler_service.core.request import Generation, QueueStatus, Request, RequestLimits, Result
from sampler_service.core.room import Room
from sampler_service.core.sampling import stream_keys
from sampler_service.core.scoring import PromptScorer
from sampler_service.core.sequence import Sequence, SequenceGroup, StateUnknown, StopRules
from sampler_service.core.versions import VersionStore
from sampler_service.grammars import Grammars
from sampler_service.metrics import Requests
from tinsmith.errors import Cancelled, EngineDead, NotReady, OutOfCapacity, ServiceError
from tinsmith.modeling.adapter import Group, Target
from tinsmith.modeling.full_weights import FullWeights, Weights
from tinsmith.pictures.processing import Processor
from tinsmith.rpc.paths import is_newer

logger = logging.getLogger(__name__)

SAMPLE_STREAM = 0
"""Number of the random stream from which sequences are drawn. A seed gives several streams."""


class SamplingEngine(Protocol):
    """Generates from one base model and the versions installed beside it. All methods belong to the event loop."""

    @property
    def name(self) -> str:
        """Name of the engine: "torch" or "vllm"."""
        ...

    @property
    def device(self) -> str:
        """Device on which the engine runs: "cpu" or "cuda"."""
        ...

    @property
    def weights_device(self) -> str:
        """Device on which this process receives versions: "cpu" or "cuda"."""
        ...

    @property
    def max_running(self) -> int:
        """Most sequences that run at the same time."""
        ...

    @property
    def limits(self) -> RequestLimits:
        """Bounds of a request."""
        ...

    @property
    def store(self) -> VersionStore:
        """The resident versions."""
        ...

    @property
    def requests(self) -> OpenRequests:
        """The requests that have not ended."""
        ...

    @property
    def eos_token_ids(self) -> Collection[int]:
        """Tokens that end a sequence, unless the request's stop condition is empty."""
        ...

    @property
    def targets(self) -> abc.Sequence[Target]:
        """Layers that a version may change."""
        ...

    @property
    def refused_groups(self) -> abc.Mapping[Group, str]:
        """Groups of layers that no version may change here, with the reasons."""
        ...

    @property
    def processor(self) -> Processor | None:
        """The processor of pictures; None when prompts cannot have any."""
        ...

    @property
    def why_no_pictures(self) -> str:
        """The reason for which prompts cannot have pictures; empty when they can."""
        ...

    async def submit(self, request: Request, *, stream: bool = False, request_id: str = "") -> Generation:
        """Checks and queues a request. Raises InvalidRequest, VersionNotLoaded, OutOfCapacity or EngineDead."""
        ...

    def describe(self, request_id: str) -> QueueStatus | None:
        """Progress of the youngest request with this id; None when there is none."""
        ...

    def full_weights(self, flat: Tensor) -> FullWeights:
        """A version of all parameters over a buffer. Raises Unsupported when the engine serves adapters only."""
        ...

    def memory_for(self, layout: Weights) -> Weights | None:
        """An empty version of this layout in memory of the engine's own, into which the weights are received. None if
        the engine takes a version from any memory.

        Raises OutOfCapacity.
        """
        ...

    def make_room(self, version_id: str, num_bytes: int) -> list[Weights]:
        """Evicts versions to make room for one that is to be installed. Returns the evicted versions, whose buffers may
        be used again.

        Raises AlreadyExists or OutOfCapacity when install would.
        """
        ...

    async def install(
        self, version_id: str, weights: Weights, *, on_probation: bool = False, checksum: str = ""
    ) -> None:
        """Makes a version visible to new requests; running requests keep their versions. The engine owns the weights
        from now on.

        `on_probation`: until the version is confirmed, and for a minute at most, only requests that ask for a version
        on probation see it. `checksum`: that of the received bytes, for a trainer that announces the version again.
        """
        ...

    async def move(self, run_id: str, version_id: str) -> int:
        """Moves the generations that follow a run to a version of that run, from their next token on. Later generations
        begin with that version. Returns how many sequences go on with it; 0 when the run has moved to a newer one.

        Raises InvalidRequest when it is no version of the run, VersionNotLoaded, EngineDead, or Unsupported.
        """
        ...

    async def stop(self) -> None:
        """Ends the engine; unfinished requests fail with NotReady."""
        ...


class OpenRequests:
    """The requests that have not ended. Checks each, holds its version, and ends it once. Belongs to the event loop."""

    def __init__(
        self,
        config: SamplerConfig,
        limits: RequestLimits,
        stops: StopRules,
        store: VersionStore,
        metrics: Requests,
        *,
        cancel: Callable[[SequenceGroup, ServiceError], None],
        release: Callable[[SequenceGroup], None],
    ) -> None:
        """`cancel` ends a request early, with an error. `release` frees what an ended request holds in the engine, such
        as its versions."""
        self.limits = limits
        self.stops = stops
        self.died = asyncio.Event()
        """Set when the engine cannot go on."""
        self.on_death: Callable[[], Awaitable[None]] | None = None
        """Awaited before requests fail because the engine has died, so that the service's health changes first."""
        self.room = Room(self._take_away)
        self.held_bytes = 0
        """Memory of the requests, in bytes."""
        self._max_waiting = config.max_waiting
        self._max_held_bytes = config.max_held_bytes
        self._grammars = Grammars(stops.path, vocab_size=limits.vocab_size, eos_token_ids=sorted(stops.eos_token_ids))
        self._store = store
        self._metrics = metrics
        self._cancel = cancel
        self._release = release
        self._open: dict[SequenceGroup, None] = {}
        """In the order of their arrival."""
        self._waiting: dict[SequenceGroup, None] = {}
        """Open requests of which nothing is computed yet, in the same order."""
        self._futures: set[asyncio.Future[Any]] = set()
        """Futures that fail with the engine."""
        self._stopping = False
        self._orders = itertools.count()
        self._dying: asyncio.Task[None] | None = None
        metrics.queue_limit.set(config.max_waiting)
        metrics.queue_oldest.set_function(self._oldest_s)
        metrics.waiting_tokens.set_function(self._waiting_tokens)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._open

    def __iter__(self) -> Iterator[SequenceGroup]:
        """In the order of their arrival."""
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> Collection[SequenceGroup]:
        """Requests of which nothing is computed yet, in the order of their arrival."""
        return self._waiting.keys()

    async def accept(self, request: Request, *, stream: bool, request_id: str) -> SequenceGroup:
        """Checks a request, and counts it as waiting. Raises the errors of SamplingEngine.submit."""
        check = partial(self.limits.check, request)
        await large.run(check) if request.targets is not None else check()
        stop = await self.stops.rule(request.params.stop)
        grammar = None
        if request.grammar is not None:
            grammar = await self._grammars.compiled(request.grammar)
            stop = replace(stop, token_ids=stop.token_ids | grammar.eos_token_ids)  # they end the text of the grammar
        self.check_alive()
        if len(self._waiting) >= self._max_waiting and not request.on_probation:
            raise OutOfCapacity(f"{len(self._waiting)} requests wait already, the most that max_waiting allows")
        num_bytes, most = request.num_bytes, self._max_held_bytes
        if self.held_bytes + num_bytes > most and self._open and not request.on_probation:
            raise OutOfCapacity(
                f"requests hold {self.held_bytes} bytes, this one takes {num_bytes}, and max_held_bytes is {most}"
            )
        seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
        scorer = PromptScorer(request, seed=seed) if request.wants_scores else None
        version_id = self._store.first_version(request)
        version = self._store.acquire(version_id, on_probation=request.on_probation) if version_id else None
        left = Cancelled("the caller has left")
        group = SequenceGroup(
            request=request,
            generation=Generation(stream=stream, on_cancel=lambda: self._cancel(group, left)),
            version=version,
            stop=stop,
            keys=stream_keys(seed, SAMPLE_STREAM, request.num_samples),
            scorer=scorer,
            grammar=grammar,
            request_id=request_id,
        )
        length, max_tokens, order = len(request.prompt), request.params.max_tokens, next(self._orders)
        group.sequences = [
            Sequence(
                group=group,
                index=index,
                prompt_length=length,
                max_length=self.limits.max_length if max_tokens is None else length + max_tokens,
                bounded=max_tokens is not None,
                order=order,
            )
            for index in range(request.num_samples)
        ]
        self._open[group] = self._waiting[group] = None
        self.room.enter()
        self.held_bytes += num_bytes
        self._metrics.waiting.set(len(self._waiting))
        return group

    def admit(self, group: SequenceGroup, started_at: float) -> None:
        """Records that the computation of a request has begun, at `started_at` in seconds since 1970."""
        if group in self._waiting:
            del self._waiting[group]
            group.generation.started_at = started_at
            self._metrics.waiting.set(len(self._waiting))

    def end(self, group: SequenceGroup, outcome: Result | ServiceError) -> None:
        """Ends a request. A later call for the same request does nothing, because a cancellation may cross with a
        result."""
        if group not in self._open:
            return
        del self._open[group]
        try:
            self.room.leave(cancelled=isinstance(outcome, Cancelled | NotReady))
            self._waiting.pop(group, None)
            self._metrics.waiting.set(len(self._waiting))
            self.held_bytes -= group.request.num_bytes
            self._metrics.ended.labels(outcome.reason if isinstance(outcome, ServiceError) else "ok").inc()
            self._release(group)
            group.forget_versions()
        finally:
            group.generation.finish(outcome)

    def behind(self, run_id: str, version_id: str) -> list[SequenceGroup]:
        """The requests that are to move to a version. From now on each of them holds the version. Raises the errors of
        SamplingEngine.move."""
        self.check_alive()
        if not self._store.move(run_id, version_id):
            return []
        behind = [
            group
            for group in self._open
            if group.request.follow_run == run_id
            and is_newer(version_id, group.held[-1].version_id if group.held else "", run_id=run_id)
        ]
        for group in behind:
            group.held.append(self._store.acquire(version_id))
        return behind

    @contextmanager
    def lost_without(self, group: SequenceGroup) -> Iterator[None]:
        """Ends the accepted request when the block raises. Otherwise its caller would wait for ever."""
        try:
            yield
        except Exception as error:
            failure = group.fail(error)
            self.end(group, failure)
            raise failure from error

    @contextmanager
    def dying_of_errors(self) -> Iterator[None]:
        """A context that lets the engine die when its block raises. The block changes the records of open requests;
        after an error there, some requests would wait for ever."""
        try:
            yield
        except Exception as error:
            logger.critical("the event loop's half of the engine has failed", exc_info=True)
            self.die(error)

    def check_alive(self) -> None:
        """Raises EngineDead or NotReady when no request can be taken any more."""
        if self.died.is_set():
            raise EngineDead("the engine has died; the log has the cause", computing="no")
        if self._stopping:
            raise NotReady("the sampler is shutting down")

    def die(self, error: BaseException) -> None:
        """Refuses new requests, then tells the service, then ends the open requests. A second call does nothing. The
        error of a waiting request does not say that this request may be the cause, unless `error` is a StateUnknown
        that names the request."""
        if not self.died.is_set():
            self.died.set()
            self._dying = asyncio.get_running_loop().create_task(self._end_dead(error))

    def begin_stop(self) -> None:
        """Refuses requests from now on."""
        self._stopping = True

    def end_stop(self) -> None:
        """Ends all open requests."""
        self._end_all(NotReady("the sampler is shutting down"))

    def fail_at_end(self, future: asyncio.Future[Any]) -> None:
        """Makes the future fail when the engine stops or dies before the future is done."""
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)

    async def _end_dead(self, error: BaseException) -> None:
        try:
            if self.on_death is not None:
                await self.on_death()
        finally:
            named = error.groups if isinstance(error, StateUnknown) else ()
            for group in list(self._open):
                computing = "no" if group in self._waiting and group not in named else "yes"
                self._end_surely(group, EngineDead(f"the engine has died: {error}", computing=computing))
            self._end_all(EngineDead(f"the engine has died: {error}"))

    def _take_away(self, error: ServiceError) -> None:
        for group in list(self._open):
            self._cancel(group, error)

    def _end_surely(self, group: SequenceGroup, error: ServiceError) -> None:
        """Ends a request. An error while its resources are freed is only logged, because further requests have to be
        ended."""
        try:
            self.end(group, error)
        except Exception:
            logger.exception("a request does not let go of what it holds")

    def _end_all(self, error: ServiceError) -> None:
        for group in list(self._open):
            self._end_surely(group, error)
        for future in list(self._futures):
            if not future.done():
                future.set_exception(error)

    def _oldest_s(self) -> float:
        """Seconds that the oldest waiting request has waited. The thread that serves the metrics calls this."""
        for group in list(self._waiting):
            return time.perf_counter() - group.submitted
        return 0.0

    def _waiting_tokens(self) -> int:
        """Tokens that the waiting requests have and may sample. The thread that serves the metrics calls this."""
        return sum(
            len(group.request.prompt)
            # All alike: there may be a thousand in each of thousands of requests.
            + len(group.sequences) * (group.sequences[0].max_length - group.sequences[0].prompt_length)
            for group in list(self._waiting)
        )


@dataclass(slots=True)
class EngineSlot:
    """The engine, once the model is loaded."""

    engine: SamplingEngine | None = None

    def get(self) -> SamplingEngine:
        if self.engine is None:
            raise NotReady("the base model is still loading; health turns to SERVING when it is ready")
        return self.engine
