"""The samplers: which of them are well, which versions they hold, and who gets a request.

Every replica is asked for its health twice a second. One whose connection is lost, that says that it does not serve, or
that answers nothing for `timeout_s`, gets no request any more, and what it holds is taken away as soon as another
replica is there: those calls end with NotReady, so that their callers send them again. Where no other is, calls stay
with a replica that is silent: it may only have been stopped, and go on.

A version is sampled at replicas that hold it, as far as they have said; `lacking` tells who does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.metrics import Metrics
from gateway.sampling.lives import Life
from gateway.sampling.routing import Conversations, choose, ranked
from tinsmith.rpc.channel import connect
from tinsmith.rpc.errors import NotReady
from tinsmith.rpc.tls import Certificates
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc

logger = logging.getLogger(__name__)

State = Literal["gone", "silent", "loading", "serving"]
"""No connection; a connection, and no answer; an answer that is not SERVING; well."""

_INTERVAL_S = 0.5
_RETRY_S = 0.2
_ASK_TIMEOUT_S = 2.0


@dataclass(slots=True, eq=False)
class _Held:
    """A call that a replica has in work."""

    call: Any
    weight: int
    is_taken_away: bool = False


class Replica:
    def __init__(self, address: str, *, api_key: str, certificates: Certificates | None) -> None:
        self.address = address
        # A call that was lost may have killed the sampler: whether it is made again is for tries.py to say.
        self.channel = connect(address, api_key=api_key, certificates=certificates, resends=False)
        self.life = Life()
        self.stub: Any = sampler_pb2_grpc.SamplerServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self.info: sampler_pb2.GetSamplerInfoResponse | None = None
        """What it has said last; stays while it is away."""
        self.state: State = "gone"
        self.versions: set[str] = set()
        """Those that it holds, as far as is known."""
        self.held: set[_Held] = set()
        self.load = 0
        """Sequences in work."""
        self.complaint: str | None = None
        """What it has said instead of what it serves."""
        self.poked = asyncio.Event()
        """To be asked for its health now."""

    def serves(self, base_model: str) -> bool:
        return self.state == "serving" and self.info is not None and base_model in self.info.base_models

    async def ask(self) -> None:
        """What it serves and which versions it holds."""
        self.info = await self.stub.GetSamplerInfo(sampler_pb2.GetSamplerInfoRequest(), timeout=_ASK_TIMEOUT_S)
        self.versions = await self.list_versions()

    async def list_versions(self) -> set[str]:
        return {version.version_id for version in await self.describe_versions()}

    async def describe_versions(self) -> list[sampler_pb2.VersionInfo]:
        request, found = sampler_pb2.ListVersionsRequest(), list[sampler_pb2.VersionInfo]()
        while True:
            page = await self.stub.ListVersions(request, timeout=_ASK_TIMEOUT_S)
            found += page.versions
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token


class Replicas:
    def __init__(
        self,
        addresses: Sequence[str],
        *,
        changed: asyncio.Condition,
        metrics: Metrics,
        api_key: str = "",
        certificates: Certificates | None = None,
        timeout_s: float = 3.0,
        load_factor: float = 1.25,
    ) -> None:
        """`changed` is told of every replica that comes or goes, and of what they hold. `load_factor`: see
        routing.choose."""
        self.all = [Replica(address, api_key=api_key, certificates=certificates) for address in addresses]
        self._changed = changed
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._load_factor = load_factor
        self._conversations = Conversations()
        self._listing: dict[str, asyncio.Task[None]] = {}  # by base model
        self._tasks: list[asyncio.Task[None]] = []
        self.on_serving: Callable[[Replica], None] | None = None
        """Told of each that can be used from now on, or again."""

    def start(self) -> None:
        for replica in self.all:
            self._metrics.services.sampler_state.labels(replica.address).state(replica.state)
            self._metrics.services.sampler_sequences.labels(replica.address).set_function(
                lambda replica=replica: replica.load
            )
            self._metrics.services.resubmissions.labels(replica.address)
            self._tasks += [
                asyncio.create_task(self._watch(replica)),
                asyncio.create_task(self._watch_connection(replica)),
            ]

    async def close(self) -> None:
        for task in (*self._tasks, *self._listing.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._listing.values(), return_exceptions=True)
        for replica in self.all:
            await replica.channel.close()

    # Health

    async def _watch(self, replica: Replica) -> None:
        while True:
            replica.poked.clear()
            await self._set_state(replica, await self._probe(replica))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_S if replica.state == "serving" else _RETRY_S):
                    await replica.poked.wait()

    async def _watch_connection(self, replica: Replica) -> None:
        """Says at once that a connection is lost; that it is there again is for _watch to find."""
        while True:
            connectivity = replica.channel.get_state()
            if connectivity != grpc.ChannelConnectivity.READY and replica.state != "gone":
                await self._set_state(replica, "gone")
                replica.poked.set()
            await replica.channel.wait_for_state_change(connectivity)

    async def _probe(self, replica: Replica) -> State:
        request = health_pb2.HealthCheckRequest()
        try:
            reply = await replica.health.Check(request, timeout=self._timeout_s, wait_for_ready=True)
            if reply.status != health_pb2.HealthCheckResponse.SERVING:
                return "loading"
            if replica.state != "serving":
                await replica.ask()
        except grpc.aio.AioRpcError as error:
            if replica.channel.get_state() != grpc.ChannelConnectivity.READY:
                return "gone"
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return "silent"
            if error.details() != replica.complaint:
                replica.complaint = error.details()
                logger.info("%s does not say yet what it serves: %s", replica.address, replica.complaint)
            return "loading"
        replica.complaint = None
        return "serving"

    async def _set_state(self, replica: Replica, state: State) -> None:
        if state == "serving" and (replica.state != "serving" or replica.life.is_over):
            replica.life = Life()
        if state == replica.state:
            return
        before, replica.state = replica.state, state
        self._metrics.services.sampler_state.labels(replica.address).state(state)
        if state == "serving" and replica.info is not None:
            names, num_versions = ", ".join(replica.info.base_models), len(replica.versions)
            logger.info("%s serves %s; it holds %d versions", replica.address, names, num_versions)
            if self.on_serving is not None:
                self.on_serving(replica)
        elif before == "serving":
            logger.warning("%s is %s; it had %d sequences in work", replica.address, state, replica.load)
        self._take_away()
        async with self._changed:
            self._changed.notify_all()

    def _take_away(self) -> None:
        """Ends the calls of replicas that are not well and whose work another can do. Those of a lost connection end by
        themselves."""
        for replica in self.all:
            if replica.state not in ("silent", "loading") or replica.info is None:
                continue
            if any(other.serves(name) for other in self.all for name in replica.info.base_models):
                for held in replica.held:
                    held.is_taken_away = True
                    held.call.cancel()

    # Work

    @contextlib.contextmanager
    def holding(self, replica: Replica, call: Any, *, weight: int = 1) -> Iterator[None]:
        """The replica has the call in work, until the end of the block. In it, a call that is taken away raises
        NotReady."""
        held = _Held(call, weight)
        self._metrics.services.sampler_requests.labels(replica.address).inc()
        replica.held.add(held)
        replica.load += weight
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not held.is_taken_away or (task is not None and task.cancelling()):
                raise
            raise NotReady(f"the sampler at {replica.address} does not answer") from None
        finally:
            replica.held.discard(held)
            replica.load -= weight

    def lost(self, replica: Replica) -> None:
        """A call has found it unreachable, and is going to be sent again."""
        self._metrics.services.resubmissions.labels(replica.address).inc()
        replica.poked.set()

    # Who gets a request

    def usable(self, base_model: str) -> list[Replica]:
        return [replica for replica in self.all if replica.serves(base_model)]

    def lacking(self, base_model: str, version_id: str) -> list[Replica]:
        """Those that do not hold a version, where others do."""
        usable = self.usable(base_model)
        lacking = [replica for replica in usable if version_id and version_id not in replica.versions]
        return lacking if len(lacking) < len(usable) else []

    def holders(self, base_model: str, version_id: str) -> list[Replica]:
        """The usable ones that are known to hold a version."""
        return [replica for replica in self.usable(base_model) if version_id in replica.versions]

    def candidates(self, base_model: str, version_id: str) -> list[Replica]:
        """Those that may be asked for a version, or for the base model: where some hold it, only those."""
        return self.holders(base_model, version_id) or self.usable(base_model)

    async def wait_for_holder(self, base_model: str, version_id: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.holders(base_model, version_id))

    async def wait(self, base_model: str) -> list[Replica]:
        """The usable ones, once there is one."""
        if usable := self.usable(base_model):
            return usable
        async with self._changed:
            while not (usable := self.usable(base_model)):
                await self._changed.wait()
            return usable

    async def route(
        self, base_model: str, request: sampler_pb2.SampleRequest | None = None, *, avoid: Collection[Replica] = ()
    ) -> Replica:
        """The replica for a request, or for no particular one; one to avoid only where no other may have it.
        Waits until there is one."""
        await self.wait(base_model)
        version_id = "" if request is None else request.version_id
        if version_id and len(self.usable(base_model)) > 1 and not self.holders(base_model, version_id):
            await self.list_versions(base_model)
        candidates = self.candidates(base_model, version_id) or await self.wait(base_model)
        candidates = [replica for replica in candidates if replica not in avoid] or candidates
        if request is None:
            return min(candidates, key=lambda replica: replica.load)
        if len(candidates) == 1:
            return candidates[0]
        by_address = {replica.address: replica for replica in candidates}
        tokens = b"".join(chunk.encoded_text.tokens for chunk in request.prompt)
        key = self._conversations.key(
            (version_id or base_model) + request.cache_salt,
            tokens,
            is_idle=lambda key: not by_address[ranked(key, by_address)[0]].load,
        )
        loads = {address: float(replica.load) for address, replica in by_address.items()}
        return by_address[choose(key, loads, weight=max(1, request.num_samples), factor=self._load_factor)]

    async def list_versions(self, base_model: str) -> None:
        """Asks the usable replicas what they hold; at once for all who want to know."""
        if base_model not in self._listing:
            task = asyncio.create_task(self._list_versions(self.usable(base_model)))
            self._listing[base_model] = task
            task.add_done_callback(lambda _: self._listing.pop(base_model))
        await asyncio.shield(self._listing[base_model])

    async def _list_versions(self, replicas: Sequence[Replica]) -> None:
        outcomes = await asyncio.gather(*(replica.list_versions() for replica in replicas), return_exceptions=True)
        # All at once: one that answers first would get all requests of a burst.
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, set):
                replica.versions = outcome
            elif isinstance(outcome, grpc.aio.AioRpcError):
                logger.debug("%s does not say what it holds: %s", replica.address, outcome.details())
            else:
                raise outcome
        async with self._changed:
            self._changed.notify_all()
