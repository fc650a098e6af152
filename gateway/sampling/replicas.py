"""The samplers: their health, the versions that they hold, and the choice of one for each request.

Every replica is asked for its health twice a second. A replica gets no requests while its connection is lost, it says
that it does not serve, or it has not answered for `timeout_s`. Its calls are taken away as soon as another replica can
take them: they end with NotReady, and their callers send them again. While there is no other replica, calls stay with a
silent one, whose process may only be suspended.

A version is sampled at replicas that hold it, by what they last said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.channel import DeadlineExceeded, connect
from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.sampling.lives import Life
from gateway.sampling.routing import Conversations, choose, ranked
from tinsmith.errors import InvalidRequest, NotReady, ServiceError
from tinsmith.rpc.tls import Certificates
from tinsmith.tasks import cancel_all, set_within
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc

logger = logging.getLogger(__name__)

ReplicaState = Literal["gone", "silent", "loading", "serving"]
"""gone: no connection. silent: a connection, but no answer. loading: an answer other than SERVING. serving: healthy."""

_INTERVAL_S = 0.5
"""Pause between two questions for the health of a serving replica, in seconds."""
_RETRY_S = 0.2
"""Pause between two questions for the health of any other replica, in seconds."""
_ASK_TIMEOUT_S = 2.0
"""Longest wait for a replica's description of itself or of its versions, in seconds."""
_BEHIND_S = 0.1
"""Time after the first answer for which the versions of further replicas are awaited, before the answers are used, in
seconds. A replica that hangs answers after all others."""


@dataclass(slots=True, eq=False)
class _HeldCall:
    """A call that a replica has in work."""

    call: Any
    weight: int
    is_taken_away: bool = False


class _Confirming:
    """The unary RPCs about text as streams of one reply. The attributes have the names of the stub's methods."""

    def __init__(self, channel: Any) -> None:
        service = sampler_pb2.DESCRIPTOR.services_by_name["SamplerService"].full_name
        for name, request, reply in (
            ("GetTokenizer", sampler_pb2.GetTokenizerRequest, sampler_pb2.GetTokenizerResponse),
            ("Tokenize", sampler_pb2.TokenizeRequest, sampler_pb2.TokenizeResponse),
        ):
            rpc = channel.unary_stream(
                f"/{service}/{name}",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
            setattr(self, name, rpc)


class Replica:
    """One sampler, as the gateway knows it."""

    def __init__(self, address: str, *, api_key: str, certificates: Certificates | None, is_shared: bool) -> None:
        self.address = address
        self.is_shared = is_shared
        """Whether other gateways use the sampler, too."""
        # gRPC must not resend a lost call, which may have killed the sampler; drawing.py decides about that.
        self.channel = connect(address, api_key=api_key, certificates=certificates, resends=False)
        self.life = Life(is_shared=is_shared, take_away=self.take_away)
        self.stub: Any = sampler_pb2_grpc.SamplerServiceStub(self.channel)
        # grpc.aio gives the initial metadata of a unary call only together with the reply, and a stream's at once. On
        # the wire a unary call is a stream of one message.
        self.confirming = _Confirming(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self.info: sampler_pb2.GetSamplerInfoResponse | None = None
        """The last answer to GetSamplerInfo; kept while the sampler is unreachable."""
        self.state: ReplicaState = "gone"
        self.serving_since = 0.0
        """Time at which the sampler began to serve, or served again, on the monotonic clock."""
        self.versions: set[str] = set()
        """version_ids of the versions that the sampler holds, by its last answer."""
        self.held: set[_HeldCall] = set()
        self.load = 0
        """Sequences in work for this gateway."""
        self.complaint: str | None = None
        """The last error of GetSamplerInfo that was logged."""
        self.poked = asyncio.Event()
        """Set to let `Replicas` ask for the sampler's health now."""

    @property
    def use(self) -> float:
        """Sequences in work for this gateway, divided by the number of sequences that the sampler can run at the same
        time; 0 while that number is unknown."""
        most = 0 if self.info is None else self.info.max_running
        return self.load / most if most else 0.0

    def serves(self, base_model: str) -> bool:
        return self.state == "serving" and self.info is not None and base_model in self.info.base_models

    def take_away(self) -> None:
        """Cancels the sampler's calls, whose requests are then sent again."""
        for held in self.held:
            held.is_taken_away = True
            held.call.cancel()

    async def ask(self) -> None:
        """Asks what the sampler serves and which versions it holds. Raises ServiceError."""
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
    """Watches the samplers, and chooses one for each request."""

    def __init__(self, config: GatewayConfig, *, changed: asyncio.Condition, metrics: Metrics, may_join: bool) -> None:
        """`changed`: notified when a replica comes or goes, or its versions were read. `may_join`: True if samplers may
        come later, even if there are none now."""
        self.all: list[Replica] = []
        self._known: dict[str, Replica] = {}
        """All samplers that were ever listed, by address. A sampler that is no longer listed keeps its connection until
        the gateway stops, because calls may still be ending there."""
        self.are_shared = bool(config.peer_url)
        """Whether other gateways use the samplers, too."""
        self._connect = partial(
            Replica,
            api_key=config.service_key.get_secret_value(),
            certificates=config.certificates,
            is_shared=self.are_shared,
        )
        self._may_join = may_join
        self._changed = changed
        self._metrics = metrics
        self._timeout_s = config.sampler_timeout_s
        self._load_factor = config.sampler_load_factor
        self._conversations = Conversations()
        self._listing: dict[str, asyncio.Task[None]] = {}
        """Base model -> the query of `list_versions` that has had no answers yet."""
        self._listings: set[asyncio.Task[None]] = set()
        """All queries of `list_versions` in progress."""
        self._watches: dict[Replica, tuple[asyncio.Task[None], asyncio.Task[None]]] = {}
        self.on_serving: Callable[[Replica], None] | None = None
        """Called with each replica that begins to serve, or serves again."""

    async def use(self, addresses: Sequence[str]) -> None:
        """Takes up the samplers that are new in the list, and leaves the samplers that are no longer in it. Other
        samplers then do the work of these."""
        gone = [replica for replica in self.all if replica.address not in addresses]
        for address in addresses:
            if address not in self._known:
                self._known[address] = self._connect(address)
        self.all = [self._known[address] for address in addresses]
        for replica in self.all:
            if replica not in self._watches:
                self._declare_metrics(replica)
                self._watches[replica] = (
                    asyncio.create_task(self._watch(replica)),
                    asyncio.create_task(self._watch_connection(replica)),
                )
        for replica in gone:
            for task in self._watches.pop(replica):
                task.cancel()
            await self._set_state(replica, "gone")
            replica.info = None
            replica.take_away()
            self._metrics.services.sampler_state.remove(replica.address)
            self._metrics.services.sampler_sequences.remove(replica.address)

    def _declare_metrics(self, replica: Replica) -> None:
        self._metrics.services.sampler_state.labels(replica.address).state(replica.state)
        self._metrics.services.sampler_sequences.labels(replica.address).set_function(lambda: replica.load)
        self._metrics.services.resubmissions.labels(replica.address)

    async def close(self) -> None:
        await cancel_all([*(task for watches in self._watches.values() for task in watches), *self._listings])
        for replica in self._known.values():
            await replica.channel.close()

    # Health

    async def _watch(self, replica: Replica) -> None:
        while True:
            replica.poked.clear()
            await self._set_state(replica, await self._probe(replica))
            await set_within(replica.poked, _INTERVAL_S if replica.state == "serving" else _RETRY_S)

    async def _watch_connection(self, replica: Replica) -> None:
        """Notices a lost connection at once. `_watch` notices when it is back."""
        while True:
            connectivity = replica.channel.get_state()
            if connectivity != grpc.ChannelConnectivity.READY and replica.state != "gone":
                await self._set_state(replica, "gone")
                replica.poked.set()
            await replica.channel.wait_for_state_change(connectivity)

    async def _probe(self, replica: Replica) -> ReplicaState:
        request = health_pb2.HealthCheckRequest()
        try:
            reply = await replica.health.Check(request, timeout=self._timeout_s, wait_for_ready=True)
            if reply.status != health_pb2.HealthCheckResponse.SERVING:
                return "loading"
            if replica.state != "serving":
                await replica.ask()
        except ServiceError as error:
            if replica.channel.get_state() != grpc.ChannelConnectivity.READY:
                return "gone"
            if isinstance(error, DeadlineExceeded):
                return "silent"
            if error.message != replica.complaint:
                replica.complaint = error.message
                logger.info("%s does not say yet what it serves: %s", replica.address, replica.complaint)
            return "loading"
        replica.complaint = None
        return "serving"

    async def _set_state(self, replica: Replica, state: ReplicaState) -> None:
        boot_id = "" if replica.info is None else replica.info.boot_id
        if state == "serving" and (replica.life.is_over or replica.life.boot_id != boot_id):
            replica.life = Life(boot_id, is_shared=replica.is_shared, take_away=replica.take_away)
        if state == replica.state:
            return
        before, replica.state = replica.state, state
        self._metrics.services.sampler_state.labels(replica.address).state(state)
        if state == "serving" and replica.info is not None:
            replica.serving_since = time.monotonic()
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
        """Cancels the calls of unhealthy replicas whose work another replica can do. Calls of a lost connection end by
        themselves."""
        for replica in self.all:
            if replica.state not in ("silent", "loading") or replica.info is None:
                continue
            if any(other.serves(name) for other in self.all for name in replica.info.base_models):
                replica.take_away()

    # Work

    @contextlib.contextmanager
    def holding(self, replica: Replica, call: Any, *, weight: int = 1) -> Iterator[None]:
        """Counts the call as the replica's work until the block ends. A call that is taken away raises NotReady in the
        block."""
        held = _HeldCall(call, weight)
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
        """Notes that the replica lost a call, which will be sent again. The replica's health is asked for now."""
        self._metrics.services.resubmissions.labels(replica.address).inc()
        replica.poked.set()

    # The choice of a replica

    def usable(self, base_model: str) -> list[Replica]:
        """The replicas that serve this base model now."""
        return [replica for replica in self.all if replica.serves(base_model)]

    def infos(self) -> Iterator[sampler_pb2.GetSamplerInfoResponse]:
        """The last answer of each sampler to GetSamplerInfo; a sampler that has not answered yet is left out."""
        return (replica.info for replica in self.all if replica.info is not None)

    def context_length(self, base_model: str) -> int:
        """Longest sequence that a sampler of this base model takes, in tokens; 0 while it is not known."""
        infos = [info for info in self.infos() if base_model in info.base_models]
        return max((info.max_context_length for info in infos), default=0)

    def vocab_size(self, base_model: str) -> int:
        """Vocabulary size of this base model; 0 while no sampler has said so."""
        infos = [info for info in self.infos() if base_model in info.base_models]
        return max((info.vocab_size for info in infos), default=0)

    def check_sampled(self, base_model: str) -> None:
        """Raises InvalidRequest when no sampler serves the base model, and NotReady while that is not known."""
        if any(base_model in info.base_models for info in self.infos()):
            return
        if any(replica.info is None for replica in self.all) or (self._may_join and not self.all):
            raise NotReady(f"no sampler that serves {base_model!r} has been reached yet")
        served = sorted({name for info in self.infos() for name in info.base_models})
        raise InvalidRequest(
            f"base_model: {base_model!r} cannot be sampled here; choose one of {', '.join(served) or 'none'}",
            field="base_model",
        )

    def num_wanted(self, base_model: str, version_id: str, *, num_homes: int) -> int:
        """Number of replicas that should hold a version; 0 if so many hold it now.

        The number is `num_homes` at first. It is twice the number of holders while each of them has as many sequences
        as it can run, and another replica has less than half as many as that replica can run. Only sequences of this
        gateway count.
        """
        if not version_id:
            return 0
        usable, holders = self.usable(base_model), self.holders(base_model, version_id)
        if not holders or len(holders) == len(usable):
            return 0
        if len(holders) < min(num_homes, len(usable)):
            return num_homes
        others = [replica for replica in usable if replica not in holders]
        if all(replica.use >= 1 for replica in holders) and any(replica.use < 1 / 2 for replica in others):
            return 2 * len(holders)
        return 0

    def holders(self, base_model: str, version_id: str) -> list[Replica]:
        """The usable replicas that hold a version, by their last answer."""
        return [replica for replica in self.usable(base_model) if version_id in replica.versions]

    def has_newcomer(self, base_model: str, version_id: str, *, since: float) -> bool:
        """Whether a replica that lacks the version has begun to serve since that time on the monotonic clock."""
        return any(
            replica.serving_since > since for replica in self.usable(base_model) if version_id not in replica.versions
        )

    def candidates(self, base_model: str, version_id: str) -> list[Replica]:
        """The replicas that may get a request for a version: its holders if there are any, else all usable ones."""
        return self.holders(base_model, version_id) or self.usable(base_model)

    async def wait_for_holder(self, base_model: str, version_id: str) -> None:
        """Waits until a usable replica holds the version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.holders(base_model, version_id))

    async def wait(self, base_model: str) -> list[Replica]:
        """Waits for a usable replica. Returns all usable ones."""
        if usable := self.usable(base_model):
            return usable
        async with self._changed:
            while not (usable := self.usable(base_model)):
                await self._changed.wait()
            return usable

    async def route(
        self,
        base_model: str,
        request: sampler_pb2.SampleRequest | None = None,
        *,
        avoid: Collection[Replica] = (),
        alone: bool = False,
    ) -> Replica:
        """Chooses a replica for a request. Waits until there is one. Without `request`, chooses the least loaded one.

        A replica in `avoid` is chosen only when no other may have the request. `alone`: True if the request needs a
        replica to itself (lives.py). All such requests go to one replica while other requests are kept from it.
        """
        await self.wait(base_model)
        version_id = "" if request is None else request.version_id
        if version_id and len(self.usable(base_model)) > 1 and not self.holders(base_model, version_id):
            await self.find_holder(base_model, version_id)
        candidates = self.candidates(base_model, version_id) or await self.wait(base_model)
        candidates = [replica for replica in candidates if replica not in avoid] or candidates
        if alone:
            return min(candidates, key=lambda replica: (not replica.life.is_closed, replica.load))
        candidates = [replica for replica in candidates if not replica.life.is_closed] or candidates
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

    async def find_holder(self, base_model: str, version_id: str) -> None:
        """Asks the usable replicas which versions they hold, until a replica that holds this version has answered, or
        all have answered."""
        listing = asyncio.create_task(self.list_versions(base_model))
        held = asyncio.create_task(self.wait_for_holder(base_model, version_id))
        try:
            await asyncio.wait((listing, held), return_when=asyncio.FIRST_COMPLETED)
            if listing.done():
                listing.result()
        finally:
            await cancel_all([listing, held])

    async def list_versions(self, base_model: str) -> None:
        """Asks the usable replicas which versions they hold. Callers share a query that has had no answers yet."""
        if base_model not in self._listing:
            task = asyncio.create_task(self._list_versions(base_model))
            self._listing[base_model] = task
            self._listings.add(task)
            task.add_done_callback(self._listings.discard)
        await asyncio.shield(self._listing[base_model])

    async def _list_versions(self, base_model: str) -> None:
        asked = {asyncio.create_task(replica.list_versions()): replica for replica in self.usable(base_model)}
        waiting = set(asked)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                self._end_sharing(base_model)
                # These answers are applied together; else the replica that answers first would get all requests of a
                # burst.
                if waiting:
                    soon, waiting = await asyncio.wait(waiting, timeout=_BEHIND_S)
                    done |= soon
                for answer in done:
                    self._apply(asked[answer], answer)
                async with self._changed:
                    self._changed.notify_all()
        finally:
            self._end_sharing(base_model)
            await cancel_all(waiting)

    def _end_sharing(self, base_model: str) -> None:
        """Lets later callers make a query of their own, because the answers to this task's query may lack a version
        that has come since."""
        if self._listing.get(base_model) is asyncio.current_task():
            del self._listing[base_model]

    def _apply(self, replica: Replica, answer: asyncio.Task[set[str]]) -> None:
        try:
            replica.versions = answer.result()
        except ServiceError as error:
            logger.debug("the versions at %s cannot be read: %s", replica.address, error.message)
