"""Futures: request_id -> the work in progress, and then its answer.

A client may ask for an answer again. Answers are kept in memory, up to a number of bytes. After that, the answer of a
training operation is read from the trainer's journal; the answer of a sample is gone, and the SDK samples again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import orjson

from gateway.ids import Target, is_model, operation_of, sample_of, session_of
from gateway.load import Share
from gateway.metrics import Metrics
from gateway.tenants.ledger import Ledger
from gateway.tenants.limits import Hold
from tinsmith.errors import FailedPrecondition, ServiceError
from tinsmith.formatting import duration_text
from tinsmith.rpc import logs, tracing
from tinsmith.rpc.server import RAN
from tinsmith.rpc.times import seconds_of
from tinsmith.tasks import cancel_all
from tinsmith.v1 import types_pb2

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 0.5
"""Longest wait for a service's report on what a request waits for, in seconds."""


JSON = "application/json"
PROTOBUF = "application/x-protobuf"
_OVERHEAD_BYTES = 1024
"""Memory of an answer beside its body, about."""
_TRIMMED_BELOW_BYTES = 64 * 1024
"""A body below this size is copied before it is kept: orjson's bytes hold at least 4 KiB, however short they are."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a future, as retrieve_future sends it."""

    body: bytes
    as_json: Callable[[bytes], bytes] | None = None
    """Converts a protobuf body to JSON, for clients that do not accept protobuf. None means that the body is JSON."""
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer in memory."""

    owner: str
    answer: Answer
    fingerprint: str | None
    """Hash of the request that is answered; None when only the request id is known."""

    @property
    def num_bytes(self) -> int:
        return len(self.answer.body) + _OVERHEAD_BYTES


class AnswerCache:
    """Keeps answers by request id, up to `max_bytes`.

    Above the bound, the owner whose answers take most memory loses the least recently used one. So no owner loses an
    answer to one who has more. The newest answer is always kept, even above the bound, because its client may not have
    it yet.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, KeptAnswer] = {}
        self._ids: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """owner -> request ids, the least recently used first."""
        self._bytes: Counter[str] = Counter()
        """owner -> bytes of the kept answers."""
        self._num_bytes = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def get(self, request_id: str) -> KeptAnswer | None:
        return self._kept.get(request_id)

    def use(self, request_id: str) -> None:
        self._ids[self._kept[request_id].owner].move_to_end(request_id)

    def put(self, request_id: str, kept: KeptAnswer) -> None:
        """Keeps an answer, and forgets others that no longer fit."""
        self.forget(request_id)
        if len(kept.answer.body) < _TRIMMED_BELOW_BYTES:
            kept = replace(kept, answer=replace(kept.answer, body=bytes(memoryview(kept.answer.body))))
        self._kept[request_id] = kept
        self._ids[kept.owner][request_id] = None
        self._count(kept.owner, kept.num_bytes)
        while self._num_bytes > self._max_bytes:
            largest = [owner for owner, _ in self._bytes.most_common(2)]
            oldest = next(iter(self._ids[largest[0]]))
            if oldest == request_id:
                if self._num_bytes - kept.num_bytes <= self._max_bytes:
                    return
                oldest = next(iter(self._ids[largest[1]]))
            self.forget(oldest)

    def forget(self, request_id: str) -> None:
        if (kept := self._kept.pop(request_id, None)) is not None:
            del self._ids[kept.owner][request_id]
            self._count(kept.owner, -kept.num_bytes)

    def _count(self, owner: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bytes[owner] += num_bytes
        if not self._ids[owner]:
            del self._ids[owner], self._bytes[owner]


def internal_error() -> ServiceError:
    return ServiceError("internal error of the gateway; its log has the cause")


def failed(error: ServiceError) -> Answer:
    """The answer of a failed future."""
    return Answer(orjson.dumps({"error": error.message, "category": error.category}), is_failure=True)


class Gone(Exception):
    """The future is unknown: it was never accepted, or its answer is gone."""


@dataclass(slots=True)
class FutureProgress:
    """The state of a future, and a text for the user that says what it waits for."""

    state: str = "active"
    reason: str = "the request is on its way"

    def active(self, reason: str) -> None:
        self.state, self.reason = "active", reason

    def paused(self, reason: str) -> None:
        self.state, self.reason = "paused_capacity", reason


@dataclass(slots=True, eq=False)
class Pending:
    """A client's request for work, from its arrival to its answer."""

    request_id: str
    kind: str
    group: str
    """Id of the model, sampling session or session that the work belongs to."""
    fingerprint: str | None
    """Hash of the request; None when only the request id is known."""
    progress: FutureProgress = field(default_factory=FutureProgress)
    accepted: asyncio.Future[None] | None = None
    """Done once a receipt may be given. None means that a receipt may be given at once."""
    num_tokens: int = 0
    hold: Hold | None = None
    """The reservation in the owner's budgets; released when the work ends."""
    body_share: Share | None = None
    """The memory of the request; released when the work ends."""
    ask: Callable[[], Awaitable[types_pb2.QueueStatus]] | None = None
    """Asks the service what the work waits for. None while no service has the work."""
    ran: tuple[float, float] | None = None
    """Begin and end of the service's computation, in seconds since 1970; None while not known."""
    submitted_at: float = field(default_factory=time.time)
    started_at: float = field(default_factory=time.monotonic)
    polled_s: float = field(default_factory=time.monotonic)
    """Time of the submission or of the last poll for this future alone, by time.monotonic."""
    task: asyncio.Task[None] | None = None
    answer: Answer | None = None
    waiters: set[asyncio.Future[None]] = field(default_factory=set)

    @property
    def session_id(self) -> str:
        return session_of(self.group)

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


def ran_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[float, float] | None:
    """Begin and end of the computation, in seconds since 1970, from a call's trailing metadata; None when absent."""
    for key, value in metadata or ():
        if key == RAN:
            start, _, end = str(value).partition(":")
            try:
                return float(start), float(end)
            except ValueError:
                logger.warning("%s: %r is not <start>:<end>", RAN, value)
    return None


async def explain(pending: Pending) -> FutureProgress:
    """Explains what pending work waits for: in the service's words if it answers, else in the gateway's."""
    if pending.ask is None:
        return pending.progress
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            status = await pending.ask()
    except (TimeoutError, ServiceError) as error:
        logger.debug("cannot ask what %s waits for: %s", pending.request_id, error)
        return pending.progress
    return in_words(status)


def in_words(status: types_pb2.QueueStatus) -> FutureProgress:
    """The service's text, with the position in the queue and the expected time.

    Work behind other work is "paused_capacity". Work that waits for its client is not.
    """
    facts = [f"position {status.position + 1}"] if status.position else []
    if status.HasField("expected_time"):
        facts.append(f"done in about {duration_text(seconds_of(status.expected_time))}")
    reason = f"{status.reason} ({', '.join(facts)})" if facts else status.reason
    return FutureProgress("paused_capacity" if status.position else "active", reason)


class Listener(Protocol):
    """An object that `Futures` tells when samples end."""

    def ended(self, request_id: str, target: Target) -> None:
        """Called when a sample of the client `target` has ended, with or without an answer."""

    def cancelled(self, of: Callable[[str], bool]) -> None:
        """Called when the models or sampling sessions whose id `of` accepts have ended."""

    def closing(self) -> None:
        """Called when the gateway is going down."""


class Futures:
    """Runs work, keeps its answers, and lets clients wait for them."""

    def __init__(self, *, cache_bytes: int, metrics: Metrics, ledger: Ledger) -> None:
        self._metrics = metrics
        self._ledger = ledger
        self.listener: Listener | None = None
        self._pending: dict[str, Pending] = {}
        self._num_pending: Counter[str | tuple[str, str]] = Counter()  # by kind, by group, and by kind and owner
        self._answers = AnswerCache(cache_bytes)
        self._closing = False

    def num_pending(self, kind_or_group: str, *, owner: str | None = None) -> int:
        """Number of pending futures of a kind or a group. With `owner`, only futures of the kind count whose hold
        belongs to this owner."""
        return self._num_pending[kind_or_group if owner is None else (kind_or_group, owner)]

    def numbers(self, model_id: str) -> set[int]:
        """The seq_ids of a model's operations in work."""
        found = [operation_of(pending.request_id) for pending in self._pending.values() if pending.group == model_id]
        return {operation[1] for operation in found if operation is not None}

    def busy_models(self) -> list[str]:
        """Ids of models with work in progress."""
        return sorted(group for group in self._num_pending if isinstance(group, str) and is_model(group))

    def of_kind(self, kind: str) -> list[Pending]:
        """The pending futures of a kind, the oldest first."""
        return [pending for pending in self._pending.values() if pending.kind == kind]

    def pending(self, request_id: str) -> Pending | None:
        return self._pending.get(request_id)

    def fingerprint(self, request_id: str) -> str | None:
        """Hash of the request with this id; None when this gateway does not know it."""
        if (pending := self._pending.get(request_id)) is not None:
            return pending.fingerprint
        kept = self._answers.get(request_id)
        return None if kept is None else kept.fingerprint

    def fail(self, request_id: str, error: ServiceError, *, fingerprint: str) -> None:
        """Makes a future that has already failed. Does nothing if an answer with this id is kept."""
        if request_id not in self._answers:
            self._keep(request_id, fingerprint, failed(error))
            self._ended(request_id)

    def answer(self, request_id: str) -> Answer | None:
        """The answer of a future; None when there is none yet, or it is no longer kept."""
        kept = self._answers.get(request_id)
        return None if kept is None else kept.answer

    def forget(self, request_id: str) -> None:
        """Drops an answer that its client has received, to make room for others."""
        self._answers.forget(request_id)

    def start(self, pending: Pending, work: Coroutine[None, None, Answer]) -> None:
        """Runs the work as a task. The task replaces other work with the same id. Clients that wait for the replaced
        work still get its answer."""
        self._pending[pending.request_id] = pending
        self._num_pending.update(_counted(pending))
        self._metrics.submissions.pending_futures.labels(kind=pending.kind).inc()
        pending.task = asyncio.create_task(self._run(pending, work))

    async def _run(self, pending: Pending, work: Coroutine[None, None, Answer]) -> None:
        logs.request_id.set(pending.request_id)
        if is_model(pending.group):
            logs.model_id.set(pending.group)
        outcome, why = "dropped", ""
        try:
            with tracing.span(pending.kind, request_id=pending.request_id, group=pending.group):
                pending.answer, outcome = await work, "ok"
        except Gone:
            pass
        except ServiceError as error:
            pending.answer, outcome, why = failed(error), error.category, error.message
        except Exception:
            logger.exception("%s failed", pending.kind)
            pending.answer = failed(internal_error())
            outcome = "server"
        finally:
            seconds = time.monotonic() - pending.started_at
            for counted in _counted(pending):
                self._count_down(counted)
            self._metrics.submissions.pending_futures.labels(kind=pending.kind).dec()
            self._metrics.submissions.future_seconds.labels(kind=pending.kind, outcome=outcome).observe(seconds)
            if pending.hold is not None:
                pending.hold.release()
            if pending.body_share is not None:
                pending.body_share.release()
            if self._pending.get(pending.request_id) is pending:
                del self._pending[pending.request_id]
            if pending.answer is not None:
                self._keep(pending.request_id, pending.fingerprint, pending.answer)
                started_at, computed_at = pending.ran or (None, None)
                self._ledger.span(
                    session_id=pending.session_id,
                    track=pending.group,
                    name=pending.kind,
                    request_id=pending.request_id,
                    submitted_at=pending.submitted_at,
                    started_at=started_at,
                    computed_at=computed_at,
                    ended_at=time.time(),
                    outcome=outcome,
                    num_tokens=pending.num_tokens,
                )
            pending.wake()
            self._ended(pending.request_id)
        logger.info("%s: %s after %.3f s%s", pending.kind, outcome, seconds, f": {why}" if why else "")

    def _ended(self, request_id: str) -> None:
        if self.listener is not None and (found := sample_of(request_id)) is not None:
            self.listener.ended(request_id, found[0])

    def _count_down(self, counted: str | tuple[str, str]) -> None:
        self._num_pending[counted] -= 1
        if not self._num_pending[counted]:
            del self._num_pending[counted]

    def _keep(self, request_id: str, fingerprint: str | None, answer: Answer) -> None:
        fingerprint = fingerprint or self.fingerprint(request_id)
        owner = self._ledger.owner_of(session_of(request_id))
        self._answers.put(request_id, KeptAnswer(owner, answer, fingerprint))

    async def poll(self, request_id: str, *, timeout_s: float) -> Answer | FutureProgress:
        """Waits for the answer. Returns the progress when there is no answer after `timeout_s`. Raises Gone when the id
        is unknown, or the work has ended without an answer."""
        if (kept := self._answers.get(request_id)) is not None:
            self._answers.use(request_id)
            return kept.answer
        if (pending := self._pending.get(request_id)) is None:
            raise Gone
        pending.polled_s = time.monotonic()
        if not self._closing:
            await self._wait(pending, timeout_s=timeout_s)
        if pending.answer is not None:
            return pending.answer
        if pending.task is not None and pending.task.done():
            raise Gone
        return pending.progress

    async def _wait(self, pending: Pending, *, timeout_s: float) -> None:
        waiter = asyncio.get_running_loop().create_future()
        pending.waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            pending.waiters.discard(waiter)

    def cancel(self, of: Callable[[str], bool], *, error: ServiceError) -> None:
        """Fails the work in progress of the models or sampling sessions whose id `of` accepts."""
        for pending in [pending for pending in self._pending.values() if of(pending.group)]:
            pending.answer = failed(error)
            if pending.task is not None:
                pending.task.cancel()
        if self.listener is not None:
            self.listener.cancelled(of)

    def abandon(self, request_id: str, *, kind: str) -> None:
        """Ends work that the client no longer wants. Does nothing when the work is of another kind, over, or
        unknown."""
        if (pending := self._pending.get(request_id)) is None or pending.kind != kind or pending.task is None:
            return
        pending.answer = failed(FailedPrecondition("the client has cancelled the request"))
        pending.task.cancel()

    def drop(self, request_id: str) -> None:
        """Ends work without an answer: a client that asks for it is told that it is unknown, and submits it again."""
        if (pending := self._pending.get(request_id)) is not None and pending.task is not None:
            pending.task.cancel()

    def end_polls(self) -> None:
        """Answers all long polls with try_again now, and later polls without waiting, because the gateway is going
        down."""
        self._closing = True
        for pending in self._pending.values():
            pending.wake()
        if self.listener is not None:
            self.listener.closing()

    async def close(self) -> None:
        await cancel_all(pending.task for pending in self._pending.values() if pending.task is not None)


def _counted(pending: Pending) -> list[str | tuple[str, str]]:
    whose = [] if pending.hold is None else [(pending.kind, pending.hold.owner)]
    return [pending.kind, pending.group, *whose]
