"""The trainer's view of the samplers: which ones serve, and which ones have stopped answering."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tinsmith.errors import AlreadyExists, InvalidRequest, OutOfCapacity, Unsupported
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.rpc.channel import connect, is_serving
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.tls import Certificates
from tinsmith.rpc.words import word_of
from tinsmith.tasks import cancel_all
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, types_pb2, weight_sync_pb2_grpc
from trainer_service.weight_sync.calls import ChannelBroken

logger = logging.getLogger(__name__)

T = TypeVar("T")

LeftOut = Literal["gone", "not_serving", "full", "no_group", "not_measured", "not_confirmed"]
"""Reasons for which a home of a version, a sampler that was chosen for it, does not have the version. gone: no
connection. not_serving: a connection, but the sampler loads or does not answer. full: it had no room for a version
lately. no_group: no transport to it yet. not_measured: it did not score the canary in time. not_confirmed: it was
measured, and then did not answer."""

_RECONNECT_S = 0.5
_INFO_S = 5.0
_GUARD_DELAY_S = 0.25
"""Time of a publish after which its members' health is checked, in seconds. Most publishes are shorter."""
_GUARD_PERIOD_S = 0.5
_BEHIND_S = 0.5
"""How much later than the first member another may answer a health check before it counts as lost, in seconds. All are
asked at the same time, and on a busy machine all are late, so that a member that is this far behind hangs."""
_REFUSALS = (InvalidRequest, Unsupported, OutOfCapacity)
"""Errors of a sampler that another attempt would not change."""


class Sampler:
    """One sampler and the connection to it. `serving`: the state that was heard last."""

    def __init__(self, address: str, *, api_key: str, certificates: Certificates | None) -> None:
        self.address = address
        self.channel = connect(address, api_key=api_key, certificates=certificates)
        self.weights = weight_sync_pb2_grpc.WeightSyncServiceStub(self.channel)
        self.versions = sampler_pb2_grpc.SamplerServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)  # its methods are made at run time
        self.serving = False
        self.info: sampler_pb2.GetSamplerInfoResponse | None = None
        """The sampler's answer when it was last found serving; None until then."""
        self.watching: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()
        """Held while a group with this sampler is formed, and while a version is sent to the sampler."""
        self.full_until = 0.0
        """Time on the monotonic clock until which no version is sent to this sampler, because it had no room for
        one."""

    @property
    def absence(self) -> LeftOut:
        """The reason for which the newest version was not sent to this sampler."""
        if not self.serving:
            return "not_serving" if self.channel.get_state() == grpc.ChannelConnectivity.READY else "gone"
        return "full" if self.full_until > time.monotonic() else "no_group"

    async def call(self, call: Awaitable[T]) -> T:
        """Awaits a call to the sampler. Raises AlreadyExists, the errors in _REFUSALS, and ChannelBroken for any
        other."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            cause = from_rpc_error(error)
            if isinstance(cause, (AlreadyExists, *_REFUSALS)):
                raise cause from error
            epoch = int(cause.metadata.get("epoch", "0"))
            raise ChannelBroken(f"{self.address}: {cause}", epoch=epoch) from error


class Samplers:
    """All samplers of a trainer. Made and used on one event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        api_key: str,
        silence_s: float,
        on_change: Callable[[Sampler], None],
        certificates: Certificates | None = None,
    ) -> None:
        """`silence_s`: while weights are sent, a sampler that leaves a health check unanswered for this long counts as
        lost, in seconds; sooner where others have answered. `on_change`: called when a sampler begins or ceases to
        serve."""
        self._connect = partial(Sampler, api_key=api_key, certificates=certificates)
        self.known = {address: self._connect(address) for address in addresses}
        """All samplers that were ever listed, by address. A sampler that is no longer listed keeps its connection until
        the trainer stops, because a publish may still wait on it."""
        self.all = list(self.known.values())
        self._silence_s = silence_s
        self._on_change = on_change

    def serving(self) -> list[Sampler]:
        return [sampler for sampler in self.all if sampler.serving]

    def with_room(self) -> list[Sampler]:
        """The serving samplers that have not lately been full. If all of them have been full, all serving samplers."""
        serving, now = self.serving(), time.monotonic()
        return [sampler for sampler in serving if sampler.full_until < now] or serving

    def ranked(self, run_id: str, samplers: Sequence[Sampler]) -> list[Sampler]:
        """The samplers in the order in which a run's versions take them for their homes.

        The order is that of rendezvous hashing (Thaler and Ravishankar, 1998), so a sampler that comes or goes changes
        the homes of no run but those that it has.
        """
        return sorted(samplers, key=lambda each: xxhash.xxh3_128_digest(f"{run_id} {each.address}".encode()))

    def check_servable(self, config: AdapterConfig, *, num_bytes: int) -> None:
        """Raises InvalidRequest for versions that a sampler could never serve, by its newest known limits. Samplers
        that have never answered are ignored. `num_bytes`: size of one version."""
        rank = config.rank
        for sampler in self.all:
            info = sampler.info
            if info is None:
                continue
            if rank > info.max_lora_rank:
                raise InvalidRequest(
                    f"lora_config.rank: {rank} could be trained, but never published: the sampler at {sampler.address} "
                    f"serves ranks up to {info.max_lora_rank} (its max_lora_rank)",
                    field="lora_config.rank",
                )
            if info.max_version_bytes and num_bytes > info.max_version_bytes:
                raise InvalidRequest(
                    f"lora_config.rank: {rank} could be trained, but never published: a version has {num_bytes} bytes, "
                    f"and the sampler at {sampler.address} holds {info.max_version_bytes} (its adapter_memory_bytes)",
                    field="lora_config.rank",
                )
            served = {word_of(types_pb2.AdapterGroup, group) for group in info.adapter_groups}
            unserved = config.groups - served
            if rank and served and unserved:
                field = f"lora_config.train_{min(unserved)}"
                raise InvalidRequest(
                    f"{field}: such an adapter could be trained, but never published: the sampler at {sampler.address} "
                    f"serves adapters on {', '.join(sorted(served))}; set it to false",
                    field=field,
                )

    def use(self, addresses: Sequence[str]) -> None:
        """Watches the samplers of the list, and leaves those that are no longer in it."""
        gone = [sampler for sampler in self.all if sampler.address not in addresses]
        for address in addresses:
            if address not in self.known:
                self.known[address] = self._connect(address)
        self.all = [self.known[address] for address in addresses]
        for sampler in gone:
            if sampler.watching is not None:
                sampler.watching.cancel()
                sampler.watching = None
            sampler.info = None
            self._set_serving(sampler, False)
        for sampler in self.all:
            if sampler.watching is None:
                sampler.watching = asyncio.create_task(self._watch(sampler))

    async def close(self) -> None:
        await cancel_all(sampler.watching for sampler in self.all if sampler.watching is not None)
        await asyncio.gather(*(sampler.channel.close() for sampler in self.known.values()))

    async def check(self, samplers: Sequence[Sampler]) -> None:
        """Checks the health of samplers, and updates `serving`."""
        failing = await self._failing(samplers)
        for sampler in samplers:
            if sampler in failing:
                self._lose(sampler)
            else:
                self._set_serving(sampler, True)

    async def _failing(self, samplers: Sequence[Sampler]) -> set[Sampler]:
        """Checks the health of samplers, all at the same time. Returns those that answer that they do not serve, or
        leave the check unanswered for `silence_s` or for `_BEHIND_S` longer than one that serves."""
        checks = {
            asyncio.ensure_future(is_serving(sampler.channel, timeout_s=self._silence_s)): sampler
            for sampler in samplers
        }
        waiting = set(checks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if waiting and any(check.result() for check in done):
                    _, waiting = await asyncio.wait(waiting, timeout=_BEHIND_S)
                    break
            return {sampler for check, sampler in checks.items() if check in waiting or not check.result()}
        finally:
            for check in checks:
                check.cancel()

    async def guarded(
        self, members: Sequence[Sampler], work: Coroutine[Any, Any, T], *, among: Sequence[Sampler] = ()
    ) -> T:
        """Runs work that involves these members, and returns its result. Raises ChannelBroken as soon as a member
        does not answer a health check in time (`_silent`). `among`: samplers whose health is checked beside it, to
        compare; the members by default.

        A stopped process or a lost machine keeps its connections open. Without this check the work would wait for it
        until all timeouts have run out.
        """
        working, listening = asyncio.ensure_future(work), asyncio.ensure_future(self._silent(members, among or members))
        try:
            await asyncio.wait([working, listening], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            for member in listening.result():
                self._lose(member)
            names = ", ".join(member.address for member in listening.result())
            raise ChannelBroken(f"{names}: no answer to a health check")
        finally:
            await cancel_all([working, listening])

    async def _silent(self, members: Sequence[Sampler], among: Sequence[Sampler]) -> list[Sampler]:
        """Returns, as soon as there are any, the members that leave a health check unanswered for `silence_s`, or for
        `_BEHIND_S` longer than another sampler of `among`, or that answer that they do not serve."""
        await asyncio.sleep(_GUARD_DELAY_S)
        while True:
            failing = await self._failing(among)
            if silent := [member for member in members if member in failing]:
                return silent
            await asyncio.sleep(_GUARD_PERIOD_S)

    async def _ask(self, sampler: Sampler) -> None:
        """Updates the sampler's `info`."""
        request = sampler_pb2.GetSamplerInfoRequest()
        try:
            sampler.info = await sampler.versions.GetSamplerInfo(request, timeout=_INFO_S)
        except grpc.aio.AioRpcError as error:
            logger.warning("%s does not say what it can serve: %s", sampler.address, error.details())

    def _set_serving(self, sampler: Sampler, serving: bool) -> None:
        if serving != sampler.serving:
            sampler.serving = serving
            self._on_change(sampler)

    def _lose(self, sampler: Sampler) -> None:
        """Marks a sampler as not serving and restarts its watch: the old watch would not notice when it answers
        again."""
        self._set_serving(sampler, False)
        if sampler.watching is not None:
            sampler.watching.cancel()
            sampler.watching = asyncio.create_task(self._watch(sampler))

    async def _watch(self, sampler: Sampler) -> None:
        """Keeps `serving` up to date, for ever."""
        while True:
            call = sampler.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            try:
                async for reply in call:
                    serving = reply.status == health_pb2.HealthCheckResponse.SERVING
                    if sampler.serving and not serving:
                        break  # the sampler is stopping, and an open call would delay that
                    if serving:
                        await self._ask(sampler)
                    self._set_serving(sampler, serving)
            except grpc.aio.AioRpcError as error:
                logger.debug("%s is gone: %s", sampler.address, error.details())
            finally:
                call.cancel()
            self._set_serving(sampler, False)
            await asyncio.sleep(_RECONNECT_S)
