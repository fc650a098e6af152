"""Sends versions to the samplers that are their homes: calls to each of them, and the bytes by its group's transport.

A sampler's group is formed in advance when it begins to serve, and again after an error. Publishing does not disturb
training: a version is a copy, and nothing here runs on the compute thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
import torch

from tinsmith.errors import AlreadyExists, NotReady, OutOfCapacity, ServiceError, VersionConflict
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.full_weights import Weights
from tinsmith.rpc import tracing
from tinsmith.tasks import cancel_all
from tinsmith.threads import in_pool
from tinsmith.v1 import sampler_pb2, types_pb2
from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.weight_channel.buckets import bucket_slices, checksum, send
from tinsmith.weight_channel.transport import bucket_timeout_s
from trainer_service.config import TrainerConfig
from trainer_service.metrics import Metrics
from trainer_service.weight_sync.calls import ChannelBroken, all_of, in_thread
from trainer_service.weight_sync.group import Former, Group
from trainer_service.weight_sync.links import Links
from trainer_service.weight_sync.samplers import LeftOut, Sampler, Samplers

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 3
"""Attempts to publish a version."""
_CONFIRM_S = 2.0
"""Longest wait for a sampler's confirmation, in seconds. A later confirmation does no harm: the version has passed."""
_REMOVE_S = 1.0
"""Longest wait for samplers to remove a version, in seconds. The calls go on afterwards."""
_WITHDRAW_AGAIN_S = 0.2
"""Pause before the second attempt to withdraw a version from a sampler, in seconds. It doubles with each attempt. A
sampler refuses the call while it loads."""
_WITHDRAW_RARELY_S = 5.0
"""Longest pause between attempts to withdraw a version, in seconds."""
_FULL_S = 10.0
"""For how long no version is sent to a sampler that had no room for one while others had, in seconds."""
_MAX_WITHDRAWING = 4096
"""Most withdrawals in progress; above it the oldest are given up."""
_DTYPES = {torch.float32: types_pb2.DTYPE_FLOAT32, torch.bfloat16: types_pb2.DTYPE_BFLOAT16}


@dataclass(frozen=True, slots=True)
class Version:
    """Immutable weights, in host memory."""

    version_id: str
    base_model: str
    adapter: Weights

    @property
    def run_id(self) -> str:
        """The run that has made the version."""
        return self.version_id.rpartition("@")[0]

    @property
    def is_full(self) -> bool:
        """True for all parameters of a model, False for an adapter."""
        return not self.adapter.config.rank

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that are sent to one sampler or one group of samplers."""
        return self.adapter.flat.numel() * self.adapter.sent_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Published:
    """The result of publishing a version."""

    num_bytes: int
    """Size of the version as sent."""
    seconds: float
    """Time until the last sampler's acknowledgement, including failed attempts."""
    checksum: str
    """XXH3-128 of the bytes as sent, in hexadecimal."""
    members: Sequence[str]
    """Addresses of those of the version's homes that hold it: all that serve and have room for it. New holders have it
    on probation."""
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)
    """The reasons for which homes do not hold the version, by address. Other samplers may have taken their places."""


@dataclass(slots=True)
class _Offer:
    """The answers of samplers to the announcement of a version."""

    group: Group | None = None
    """The samplers that lack the version and have room for it; None if there are none."""
    held: dict[Sampler, str] = field(default_factory=dict)
    """The checksum of the weights under the version's id, by sampler that holds them; it may be empty."""
    full: dict[Sampler, OutOfCapacity] = field(default_factory=dict)
    """The errors of the samplers that have no room for it."""


class WeightSender:
    """Sends versions to samplers. Made and used on one event loop."""

    def __init__(
        self,
        config: TrainerConfig,
        metrics: Metrics,
        *,
        trainer_id: str,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - it is immutable
    ) -> None:
        self.config = config
        self._trainer_id = trainer_id
        self._metrics = metrics
        self._services = config.services
        self.samplers = Samplers(
            self._services.known.samplers,
            api_key=config.service_key.get_secret_value(),
            certificates=config.certificates,
            silence_s=config.channel_silence_s,
            on_change=self._on_change,
        )
        self._former = Former(config, trainer_id=trainer_id, device=device)
        self._links = Links(self._former, self.samplers, metrics)
        self.device_failed = self._links.device_failed
        """Set when a group was to be formed in the background, and the device can compute no more. A publish raises."""
        self._background: list[asyncio.Task[None]] = []
        self._removing: set[asyncio.Future[None]] = set()
        self.withdrawing: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Withdrawals that a sampler has not answered yet, by (address of the sampler, version)."""

    def start(self) -> None:
        """Begins to watch the samplers and to form groups, in the background."""
        self.samplers.use([sampler.address for sampler in self.samplers.all])
        self._background.append(asyncio.create_task(self._follow()))

    async def close(self) -> None:
        for tasks in ([*self._removing, *self.withdrawing.values()], self._background):
            await cancel_all(tasks)
        await self._links.close()
        self._former.close()
        await self.samplers.close()

    async def publish(self, version: Version, *, num_samplers: int = 0) -> Published:
        """Sends a version to the samplers that are its homes. Homes that did not have it hold it on probation.

        An adapter has `version_homes` homes, or `num_samplers` if that is more: those that `Samplers.ranked` names
        first for its run. All parameters of a model go to every sampler that serves. A sampler without room for the
        version is left out, and for `_FULL_S` from the next ones, too. A sampler whose group is not formed yet is left
        out while others have their groups. If no home takes the version, the next samplers of the ranking are tried. A
        request for a version goes to the samplers that hold it.

        Raises NotReady when all attempts have failed, OutOfCapacity when no sampler has room, another error of a
        sampler when it refuses the version, VersionConflict when a sampler has other weights of the same id, and the
        RuntimeError of a device that can compute no more.
        """
        with tracing.span("publish", version_id=version.version_id, num_bytes=version.sent_bytes):
            return await self._publish_once(version, num_samplers)

    async def _publish_once(self, version: Version, num_samplers: int) -> Published:
        started = time.perf_counter()
        if not self.samplers.serving():
            await self.samplers.check(self.samplers.all)
        await self._links.formed()
        every = self.samplers.ranked(version.run_id, self.samplers.all)
        ranked = self.samplers.ranked(version.run_id, self.samplers.with_room())
        ranked = [sampler for sampler in ranked if sampler in self._links] or ranked
        num_homes = len(every) if version.is_full else max(self.config.version_homes, num_samplers)
        error: ServiceError | None = None
        sent, holders = "", list[Sampler]()
        while ranked and not holders:
            homes, ranked = set(ranked[:num_homes]), ranked[num_homes:]
            try:
                sent, holders = await self._deliver(version, [each for each in self.samplers.all if each in homes])
            except (NotReady, OutOfCapacity) as failure:
                error = failure
        if error is not None and not holders:
            raise error
        seconds = time.perf_counter() - started
        self._metrics.publishing.publish_seconds.observe(seconds)
        sum_ = sent or await in_pool(checksum, version.adapter.flat, version.adapter.sent_dtype)
        left_out: dict[str, LeftOut] = {home.address: home.absence for home in every[:num_homes] if home not in holders}
        return Published(version.sent_bytes, seconds, sum_, [holder.address for holder in holders], left_out)

    async def _deliver(self, version: Version, members: list[Sampler]) -> tuple[str, list[Sampler]]:
        """Sends a version to those of these samplers that lack it, in up to _ATTEMPTS attempts. Returns the checksum of
        the sent bytes, empty when none lacked it, and the samplers that hold the version now: none when all have
        ceased to serve. Raises as `publish`."""
        failures: list[str] = []
        async with AsyncExitStack() as locks:
            for member in sorted(
                members, key=lambda member: member.address
            ):  # locked in one order, so that no two publishes wait for each other
                await locks.enter_async_context(member.lock)
            members = [member for member in members if member.serving]
            while members and len(failures) < _ATTEMPTS:
                try:
                    work = self._attempt(version, members)
                    return await self.samplers.guarded(members, work, among=self.samplers.serving())
                except ChannelBroken as error:
                    failures.append(str(error))
                    self._metrics.publishing.publish_failures.inc()
                    logger.warning("publish of %s, attempt %d: %s", version.version_id, len(failures), error)
                    # The traceback's frames refer to the group, and to futures that refer to the error. Without
                    # breaking that cycle the group's connections stay open, and the other ranks wait until their
                    # timeouts.
                    error.__traceback__ = None
                    self._links.drop(members)
                    await self.samplers.check([member for member in members if member.serving])
                    left = [member for member in members if member.serving]
                    if left == members:  # no member was lost, so a transport may be the cause
                        failed = [member for member in members if member.address in error.addresses]
                        self._former.distrust(failed or members)
                    members = left
        for member in members:
            self._links.begin(member)
        if members:
            raise NotReady(
                f"{version.version_id} was not published: {_ATTEMPTS} attempts failed; the last: {failures[-1]}"
            )
        return "", []

    @property
    def has_samplers(self) -> bool:
        """True when samplers are configured, whether they serve now or not."""
        return bool(self.samplers.all)

    def sampler(self, address: str) -> Sampler:
        """The sampler at an address, one of `Published.members`."""
        return self.samplers.known[address]

    async def guarded(self, address: str, work: Coroutine[Any, Any, T]) -> T:
        """Runs work that waits for a sampler. Raises ChannelBroken when the sampler hangs, as `Samplers.guarded`."""
        sampler = self.sampler(address)
        return await self.samplers.guarded([sampler], work, among=list({*self.samplers.serving(), sampler}))

    async def confirm(self, version_id: str, addresses: Collection[str]) -> Sequence[str]:
        """Makes a version visible on these samplers, all at the same time. Returns the addresses that have
        confirmed."""
        request = pb.ConfirmVersionRequest(version_id=version_id)

        async def confirmed(sampler: Sampler) -> bool:
            call = sampler.weights.ConfirmVersion(request, timeout=_CONFIRM_S)
            try:
                await self.guarded(sampler.address, sampler.call(call))
            except (ServiceError, ChannelBroken) as error:
                logger.warning("%s did not confirm %s: %s", sampler.address, version_id, error)
                return False
            return True

        asked = [sampler for sampler in self.samplers.all if sampler.address in addresses]
        for sampler in asked:
            if (late := self.withdrawing.pop((sampler.address, version_id), None)) is not None:
                late.cancel()  # an earlier certificate refused the version, and this one passed
        answers = await asyncio.gather(*(confirmed(sampler) for sampler in asked))
        return [sampler.address for sampler, answer in zip(asked, answers, strict=True) if answer]

    async def withdraw(self, version_id: str) -> None:
        """Removes a version that must not be served from every sampler, even from those that do not serve now.

        Waits for at most a second. A sampler that does not answer, because it is stopped or out of reach, may still
        hold the version. It is told as soon as it can be reached, unless the version is confirmed meanwhile.
        """
        awaited = []
        for sampler in self.samplers.all:
            key = sampler.address, version_id
            if (task := self.withdrawing.get(key)) is None:
                task = self.withdrawing[key] = asyncio.create_task(self._withdraw(sampler, version_id))
            if sampler.serving:
                awaited.append(task)
        while len(self.withdrawing) > _MAX_WITHDRAWING:
            self.withdrawing.pop(next(iter(self.withdrawing))).cancel()
        if awaited:
            await asyncio.wait(awaited, timeout=_REMOVE_S)

    async def _withdraw(self, sampler: Sampler, version_id: str) -> None:
        request = pb.RemoveVersionRequest(version_id=version_id)
        again_s = _WITHDRAW_AGAIN_S
        while True:
            try:
                # The call has no timeout: a stopped process answers it when it continues.
                await sampler.weights.RemoveVersion(request, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                level = logging.WARNING if again_s == _WITHDRAW_AGAIN_S else logging.DEBUG
                logger.log(level, "%s has not removed %s yet: %s", sampler.address, version_id, error.details())
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, max(_WITHDRAW_RARELY_S, _WITHDRAW_AGAIN_S))
            else:
                break
        if self.withdrawing.get((sampler.address, version_id)) is asyncio.current_task():
            del self.withdrawing[sampler.address, version_id]

    async def remove_all(self, prefix: str) -> None:
        """Asks every serving sampler to free the versions whose ids begin with `prefix`. A failure only costs memory:
        idle versions are evicted anyway."""
        await self._each(lambda sampler: self._remove_all(sampler, prefix))

    async def _each(self, call: Callable[[Sampler], Awaitable[object]]) -> None:
        """Makes a call on all serving samplers at once. Waits for at most _REMOVE_S; the calls go on afterwards."""
        removing = [asyncio.ensure_future(self._try(sampler, call(sampler))) for sampler in self.samplers.serving()]
        self._removing.update(removing)
        for one in removing:
            one.add_done_callback(self._removing.discard)
        if removing:
            await asyncio.wait(removing, timeout=_REMOVE_S)

    async def _remove_all(self, sampler: Sampler, prefix: str) -> None:
        request = sampler_pb2.ListVersionsRequest()
        found: list[str] = []
        while True:
            page = await sampler.versions.ListVersions(request, timeout=self.config.channel_timeout_s)
            found += [version.version_id for version in page.versions if version.version_id.startswith(prefix)]
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        for version_id in found:
            await sampler.weights.RemoveVersion(
                pb.RemoveVersionRequest(version_id=version_id), timeout=self.config.channel_timeout_s
            )

    async def _try(self, sampler: Sampler, call: Awaitable[object]) -> None:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            logger.warning("%s did not remove a version: %s", sampler.address, error.details())

    def _on_change(self, sampler: Sampler) -> None:
        """Called when a sampler begins or ceases to serve."""
        self._links.drop([sampler])  # a sampler that comes back no longer knows its group
        self._metrics.publishing.samplers.set(len(self.samplers.serving()))
        if sampler.serving:
            self._links.begin(sampler)
        else:
            self._former.forget([sampler])

    async def _follow(self) -> None:
        async for services in self._services.changes():
            self.samplers.use(services.samplers)

    async def _attempt(self, version: Version, members: Sequence[Sampler]) -> tuple[str, list[Sampler]]:
        """Sends a version to those members that lack it. Returns as `_deliver`. Raises OutOfCapacity when no member has
        room for it, ChannelBroken when a member or its transport fails, and the errors of `_check_same`."""
        parts = [members] if version.is_full else [[member] for member in members]
        offers = await all_of(*(_named(part, self._offer(version, part)) for part in parts))
        held, full = dict[Sampler, str](), dict[Sampler, OutOfCapacity]()
        for offer in offers:
            held |= offer.held
            full |= offer.full
        await _check_same(version, {member.address: sum_ for member, sum_ in held.items() if sum_})
        for member, error in full.items():
            logger.warning("%s is not published to %s: %s", version.version_id, member.address, error)
            member.full_until = time.monotonic() + _FULL_S
        holders = [member for member in members if member not in full]
        if not holders:
            raise next(iter(full.values()))
        groups = [offer.group for offer in offers if offer.group is not None]
        if not groups:
            return "", holders
        sums = await all_of(*(_named(group.members, self._transfer(group, version)) for group in groups))
        self._metrics.publishing.publish_bytes.inc(version.sent_bytes * len(groups))
        return sums[0], holders

    async def _offer(self, version: Version, members: Sequence[Sampler]) -> _Offer:
        """Announces a version to these samplers, as one group."""
        offer = _Offer()
        while members:
            group = await self._links.group_of(members)
            members = await self._announce(group, version, offer)
            # A broadcast goes to a whole group, so all of its members must lack the version and have room for it.
            if len(members) == len(group.members):
                offer.group = group
                break
        return offer

    async def _announce(self, group: Group, version: Version, offer: _Offer) -> list[Sampler]:
        """Announces a version to the group. Returns the members that do not hold it yet and have room for it; notes the
        others in `offer`."""
        adapter = version.adapter
        request = pb.StartWeightUpdateRequest(
            trainer_id=self._trainer_id,
            epoch=group.epoch,
            version_id=version.version_id,
            base_model=version.base_model,
            lora_config=config_to_proto(adapter.config),
            tensors=[pb.TensorSpec(name=name, shape=shape) for name, shape in adapter.specs()],
            dtype=_DTYPES[adapter.sent_dtype],
            bucket_bytes=group.bucket_bytes,
            quantize=self.config.quantize or "",
        )
        lacking: list[Sampler] = []

        async def announce(member: Sampler) -> None:
            try:
                await member.call(member.weights.StartWeightUpdate(request, timeout=self.config.channel_timeout_s))
            except AlreadyExists as error:
                offer.held[member] = error.metadata.get("checksum", "")
            except OutOfCapacity as error:
                offer.full[member] = error
            else:
                lacking.append(member)

        await all_of(*(announce(member) for member in group.members))
        return [member for member in group.members if member in lacking]

    async def _transfer(self, group: Group, version: Version) -> str:
        """Sends a version that all members lack. Returns the checksum of the sent bytes."""
        flat, dtype, bucket_bytes = version.adapter.flat, version.adapter.sent_dtype, group.bucket_bytes
        named = {"trainer_id": self._trainer_id, "version_id": version.version_id, "epoch": group.epoch}
        slices = bucket_slices(flat.numel(), itemsize=dtype.itemsize, bucket_bytes=bucket_bytes)
        timeout_s = len(slices) * bucket_timeout_s(bucket_bytes)
        update = pb.UpdateWeightsRequest(**named)
        sending = in_thread(lambda: send(group.outlets, flat, dtype=dtype, bucket_bytes=bucket_bytes))
        await all_of(
            *(member.call(member.weights.UpdateWeights(update, timeout=timeout_s)) for member in group.members), sending
        )
        finish = pb.FinishWeightUpdateRequest(**named, checksum=sending.result())
        await all_of(
            *(
                member.call(member.weights.FinishWeightUpdate(finish, timeout=self.config.channel_timeout_s))
                for member in group.members
            )
        )
        return sending.result()


async def _named(members: Sequence[Sampler], work: Awaitable[T]) -> T:
    """Awaits work on the group of these members, whose ChannelBroken gets their addresses."""
    try:
        return await work
    except ChannelBroken as error:
        error.addresses = [member.address for member in members]
        raise


async def _check_same(version: Version, held: Mapping[str, str]) -> None:
    """Raises VersionConflict when a sampler holds other weights under the version's id. `held`: the checksums of the
    samplers' weights, by address."""
    if not held:
        return
    ours = await in_pool(checksum, version.adapter.flat, version.adapter.sent_dtype)
    for address, theirs in held.items():
        if theirs != ours:
            raise VersionConflict(
                f"the sampler at {address} serves other weights as {version.version_id}: their XXH3-128 is {theirs}, "
                f"that of the weights to be published is {ours}. Two checkpoints have the same version id. An earlier "
                "release of Tinsmith may have used the run's id again, or its journal was put back from a backup. The "
                "sampler keeps its weights; to sample from the others, load them into a new run and save that",
                version_id=version.version_id,
                sampler=address,
                checksum=theirs,
            )
