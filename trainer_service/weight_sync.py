"""The sending end of the weight channel: one trainer, any number of samplers, one process group at a time.

A group holds the samplers that serve. It is formed ahead of need, when one joins or leaves, and anew after an error.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio
import torch
import torch.distributed as dist
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tinsmith.modeling.full_weights import Weights
from tinsmith.rpc.channel import connect, is_serving
from tinsmith.rpc.errors import AlreadyExists, InvalidRequest, NotReady, OutOfCapacity, Unsupported, from_rpc_error
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, types_pb2, weight_sync_pb2, weight_sync_pb2_grpc
from tinsmith.weight_buckets import checksum, send
from tinsmith.weight_group import Backend, WeightGroup, join_store, open_store
from trainer_service.metrics import Metrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 3
_RECONNECT_S = 0.5
_DTYPES = {torch.float32: types_pb2.DTYPE_FLOAT32, torch.bfloat16: types_pb2.DTYPE_BFLOAT16}
_REFUSALS = (InvalidRequest, Unsupported, OutOfCapacity)
"""Answers of a sampler that another try would not change."""


@dataclass(frozen=True, slots=True)
class Version:
    """Immutable weights, in host memory."""

    version_id: str
    base_model: str
    adapter: Weights

    @property
    def sent_bytes(self) -> int:
        return self.adapter.flat.numel() * self.adapter.sent_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a version."""

    num_bytes: int
    """Of the buffer on the wire."""
    seconds: float
    """From the announcement to the last sampler's acknowledgement, with all attempts."""
    checksum: str
    """XXH3-128 of the buffer's bytes on the wire, in hexadecimal."""
    members: Sequence[str]
    """Addresses of the samplers that hold the version: all that serve; none when there is none."""


class _ChannelBroken(Exception):
    """The group, or one of its members, is of no use any more."""


@dataclass(slots=True, eq=False)
class _Sampler:
    address: str
    channel: grpc.aio.Channel
    weights: weight_sync_pb2_grpc.WeightSyncServiceStub
    versions: sampler_pb2_grpc.SamplerServiceStub
    health: health_pb2_grpc.HealthStub
    serving: bool = False

    @classmethod
    def at(cls, address: str, *, api_key: str) -> _Sampler:
        channel = connect(address, api_key=api_key)
        return cls(
            address,
            channel,
            weight_sync_pb2_grpc.WeightSyncServiceStub(channel),
            sampler_pb2_grpc.SamplerServiceStub(channel),
            health_pb2_grpc.HealthStub(channel),
        )


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """The TCP store of this trainer, and its own connection to it.

    torch looks up the name of every peer, so a connection may take seconds where DNS is slow: both are used for group
    after group. When the server object goes, all waits of all ranks for each other end at once, with an error.
    """

    server: dist.TCPStore
    client: dist.TCPStore
    port: int

    @classmethod
    def open(cls, host: str, *, timeout_s: float) -> _Rendezvous:
        server = open_store(host, timeout_s=timeout_s)
        return cls(server, join_store(host, server.port, timeout_s=timeout_s), server.port)


@dataclass(frozen=True, slots=True)
class _Group:
    members: Sequence[_Sampler]
    weights: WeightGroup


class WeightSender:
    """Publishes versions. To be made and used on one event loop."""

    def __init__(
        self,
        samplers: Sequence[str],
        *,
        trainer_id: str,
        host: str,
        backend: Backend,
        timeout_s: float,
        metrics: Metrics,
        bucket_bytes: int = 16 * 1024**2,
        api_key: str = "",
    ) -> None:
        """`timeout_s` is for one call, or one bucket of a transfer. `api_key` is sent to the samplers, unless empty."""
        self._trainer_id = trainer_id
        self._host = host
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._metrics = metrics
        self._samplers = [_Sampler.at(address, api_key=api_key) for address in samplers]
        self._epoch = time.time_ns() // 1_000_000  # grows over restarts of this trainer, too
        self._rendezvous: _Rendezvous | None = None
        self._group: _Group | None = None
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Watches the samplers and forms groups in the background."""
        coroutines = [self._watch(sampler) for sampler in self._samplers]
        self._tasks = [asyncio.create_task(coroutine) for coroutine in (*coroutines, self._keep_formed())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._group = self._rendezvous = None
        await asyncio.gather(*(sampler.channel.close() for sampler in self._samplers))

    async def publish(self, version: Version) -> Published:
        """Brings the version to all samplers that serve.

        Raises NotReady when the channel failed again and again, and a sampler's own error when it refuses the version.
        """
        async with self._lock:
            started = time.perf_counter()
            if not self._serving():
                await self._check_health()
            failures: list[str] = []
            while len(failures) < _ATTEMPTS:
                try:
                    members, sent = await self._publish(version)
                except _ChannelBroken as error:
                    failures.append(str(error))
                    self._metrics.publish_failures.inc()
                    logger.warning("publish of %s, attempt %d: %s", version.version_id, len(failures), error)
                    self._group = None
                    # The traceback's frames hold the group, and the futures that hold the error. While that ring
                    # stands, the group's connections stay, and the other ranks wait on them until their timeouts.
                    error.__traceback__ = None
                    await self._check_health()
                else:
                    seconds = time.perf_counter() - started
                    self._metrics.publish_seconds.observe(seconds)
                    sum_ = sent or await asyncio.to_thread(checksum, version.adapter.flat, version.adapter.sent_dtype)
                    return Published(version.sent_bytes, seconds, sum_, [member.address for member in members])
        raise NotReady(f"{version.version_id} was not published: {_ATTEMPTS} attempts failed; the last: {failures[-1]}")

    async def remove(self, version_id: str) -> None:
        """Asks every sampler to free a version. Best effort: an idle one is evicted by the sampler anyway."""
        request = sampler_pb2.RemoveVersionRequest(version_id=version_id)
        for sampler in self._serving():
            await self._try(sampler, sampler.versions.RemoveVersion(request, timeout=self._timeout_s))

    async def remove_all(self, prefix: str) -> None:
        """The same for every version whose id begins so."""
        for sampler in self._serving():
            await self._try(sampler, self._remove_all(sampler, prefix))

    async def _remove_all(self, sampler: _Sampler, prefix: str) -> None:
        request = sampler_pb2.ListVersionsRequest()
        found: list[str] = []
        while True:
            page = await sampler.versions.ListVersions(request, timeout=self._timeout_s)
            found += [version.version_id for version in page.versions if version.version_id.startswith(prefix)]
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        for version_id in found:
            await sampler.versions.RemoveVersion(
                sampler_pb2.RemoveVersionRequest(version_id=version_id), timeout=self._timeout_s
            )

    async def _try(self, sampler: _Sampler, call: Awaitable[object]) -> None:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            logger.warning("%s did not remove a version: %s", sampler.address, error.details())

    def _serving(self) -> list[_Sampler]:
        return [sampler for sampler in self._samplers if sampler.serving]

    def _set_serving(self, sampler: _Sampler, serving: bool) -> None:
        if serving == sampler.serving:
            return
        sampler.serving = serving
        if self._group is not None and sampler in self._group.members:
            self._group = None  # one that comes back has forgotten its group
        self._metrics.samplers.set(len(self._serving()))
        self._changed.set()

    async def _check_health(self) -> None:
        states = await asyncio.gather(*(is_serving(sampler.channel) for sampler in self._samplers))
        for sampler, serving in zip(self._samplers, states, strict=True):
            self._set_serving(sampler, serving)

    async def _watch(self, sampler: _Sampler) -> None:
        while True:
            request = health_pb2.HealthCheckRequest()
            call = sampler.health.Watch(request, wait_for_ready=True)  # type: ignore[attr-defined]  # not in the stubs
            try:
                async for reply in call:
                    serving = reply.status == health_pb2.HealthCheckResponse.SERVING
                    if sampler.serving and not serving:
                        break  # it is stopping: an open call would hold it up
                    self._set_serving(sampler, serving)
            except grpc.aio.AioRpcError as error:
                logger.debug("%s is gone: %s", sampler.address, error.details())
            finally:
                call.cancel()
            self._set_serving(sampler, False)
            await asyncio.sleep(_RECONNECT_S)

    async def _keep_formed(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._lock:
                if members := self._serving():
                    try:
                        await self._group_of(members)
                    except _ChannelBroken as error:
                        logger.warning("no group of samplers yet: %s", error)

    async def _group_of(self, members: Sequence[_Sampler]) -> _Group:
        if self._group is None or list(self._group.members) != list(members):
            self._group = None
            self._group = await self._form(members)
        return self._group

    async def _form(self, members: Sequence[_Sampler]) -> _Group:
        started = time.perf_counter()
        client, port = await self._meeting_point()
        world_size = len(members) + 1
        self._epoch += 1
        epoch = self._epoch
        forming = _in_thread(
            lambda: WeightGroup.form(
                client,
                epoch=epoch,
                rank=0,
                world_size=world_size,
                backend=self._backend,
                host=self._host,
                timeout_s=self._timeout_s,
            )
        )
        joining = [
            self._call(
                member,
                member.weights.InitWeightTransfer(
                    weight_sync_pb2.InitWeightTransferRequest(
                        trainer_id=self._trainer_id,
                        epoch=epoch,
                        store_host=self._host,
                        store_port=port,
                        rank=rank,
                        world_size=world_size,
                        backend=self._backend,
                    ),
                    timeout=self._timeout_s,
                ),
            )
            for rank, member in enumerate(members, start=1)
        ]
        try:
            await _all(forming, *joining)
        except BaseException:
            self._rendezvous = None
            raise
        self._metrics.weight_groups.inc()
        logger.info("weight group %d of %d samplers: %.3f s", epoch, len(members), time.perf_counter() - started)
        return _Group(members, forming.result())

    async def _meeting_point(self) -> tuple[dist.Store, int]:
        """This end's connection to the store, and the port where the others find it."""
        rendezvous = self._rendezvous
        if rendezvous is None:
            rendezvous = await _in_thread(lambda: _Rendezvous.open(self._host, timeout_s=self._timeout_s))
            self._rendezvous = rendezvous
        return rendezvous.client, rendezvous.port

    async def _publish(self, version: Version) -> tuple[Sequence[_Sampler], str]:
        """Returns who holds the version, and the checksum of what was sent; empty when nothing had to be."""
        members, sent = self._serving(), ""
        if not members:
            return members, sent
        group = await self._group_of(members)
        lacking = await self._announce(group, version)
        if lacking and len(lacking) < len(members):
            # A broadcast needs all of its group, and those that hold the version will not take it again.
            group = await self._group_of(lacking)
            lacking = await self._announce(group, version)
        if lacking:
            sent = await self._transfer(group, version)
            self._metrics.publish_bytes.inc(version.sent_bytes)
        return members, sent

    async def _announce(self, group: _Group, version: Version) -> list[_Sampler]:
        """Returns the members that do not hold the version yet."""
        adapter = version.adapter
        request = weight_sync_pb2.StartWeightUpdateRequest(
            trainer_id=self._trainer_id,
            epoch=group.weights.epoch,
            version_id=version.version_id,
            base_model=version.base_model,
            lora_config=adapter.config.to_proto(),
            tensors=[weight_sync_pb2.TensorSpec(name=name, shape=shape) for name, shape in adapter.specs()],
            dtype=_DTYPES[adapter.sent_dtype],
            bucket_bytes=self._bucket_bytes,
        )

        async def announce(member: _Sampler) -> bool:
            try:
                await self._call(member, member.weights.StartWeightUpdate(request, timeout=self._timeout_s))
            except AlreadyExists:
                return False
            return True

        needed = await _all(*(announce(member) for member in group.members))
        return [member for member, needs in zip(group.members, needed, strict=True) if needs]

    async def _transfer(self, group: _Group, version: Version) -> str:
        """Returns the checksum."""
        adapter = version.adapter
        device = "cuda" if self._backend == "nccl" else "cpu"
        update = weight_sync_pb2.UpdateWeightsRequest(trainer_id=self._trainer_id, version_id=version.version_id)
        timeout_s = self._timeout_s * math.ceil(version.sent_bytes / self._bucket_bytes)
        sending = _in_thread(
            lambda: send(
                group.weights,
                adapter.flat,
                dtype=adapter.sent_dtype,
                device=device,
                bucket_bytes=self._bucket_bytes,
            )
        )
        await _all(
            *(self._call(member, member.weights.UpdateWeights(update, timeout=timeout_s)) for member in group.members),
            sending,
        )
        finish = weight_sync_pb2.FinishWeightUpdateRequest(
            trainer_id=self._trainer_id, version_id=version.version_id, checksum=sending.result()
        )
        await _all(
            *(
                self._call(member, member.weights.FinishWeightUpdate(finish, timeout=self._timeout_s))
                for member in group.members
            )
        )
        return sending.result()

    @staticmethod
    async def _call(member: _Sampler, call: Awaitable[T]) -> T:
        """Raises AlreadyExists and refusals as they are; everything else breaks the group."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            cause = from_rpc_error(error)
            if isinstance(cause, (AlreadyExists, *_REFUSALS)):
                raise cause from error
            raise _ChannelBroken(f"{member.address}: {cause}") from error


def _in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Runs a blocking call of torch.distributed. It cannot be stopped, so its thread must not hold up the exit.

    RuntimeError, which is what such a call raises, becomes _ChannelBroken.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except RuntimeError as error:
            done.set_exception(_ChannelBroken(str(error)))
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="weight-channel", daemon=True).start()
    return asyncio.wrap_future(done)


async def _all(*awaitables: Awaitable[T]) -> list[T]:
    """The results; or the first error, at once: the others are cancelled, and threads left to their timeouts."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
