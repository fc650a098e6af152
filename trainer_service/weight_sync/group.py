"""One epoch of the channel: some samplers, and a transport for each of them. It is formed anew after every error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from socket import socket

import torch
import torch.distributed as dist

from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.weight_channel import ring
from tinsmith.weight_channel.group import Backend, WeightGroup, join_store, open_store
from tinsmith.weight_channel.ring import RingListener, RingOutlet
from tinsmith.weight_channel.ring_memory import cuda_handle, gpu_uuid, make_cuda_ring, make_host_ring
from tinsmith.weight_channel.transport import COLLECTIVE, ON_CUDA, Outlet, Transport
from trainer_service.weight_sync.calls import ChannelBroken, all_of, in_thread
from trainer_service.weight_sync.choice import Channel, Place, choose
from trainer_service.weight_sync.samplers import Sampler

logger = logging.getLogger(__name__)

_RING_BUCKET_BYTES = 4 * 1024**2
"""Where a ring serves all: its slots then stay in the processor's cache, between the two copies."""


@dataclass(frozen=True, slots=True)
class Group:
    epoch: int
    members: Sequence[Sampler]
    outlets: Sequence[Outlet]
    transports: Sequence[Transport]
    """One for each member."""
    bucket_bytes: int

    def close(self) -> None:
        """Blocks for a moment."""
        for outlet in self.outlets:
            outlet.close()


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


class Former:
    """Forms groups, one after the other."""

    def __init__(
        self,
        *,
        trainer_id: str,
        channel: Channel,
        host: str,
        device: torch.device,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        """`host` is an address of this machine that the samplers can reach; `device` is where the trainer computes."""
        self._trainer_id = trainer_id
        self._channel: Channel = channel
        self._host = host
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._epoch = time.time_ns() // 1_000_000  # grows over restarts of this trainer, too
        self._rendezvous: _Rendezvous | None = None
        self._on_host: set[str] = set()
        """Addresses of members that are not trusted with GPU memory any more."""
        self._chosen: dict[str, Transport] = {}
        """By address, the last time."""

    def close(self) -> None:
        self._rendezvous = None

    async def form(self, members: Sequence[Sampler]) -> Group:
        """Raises ChannelBroken, or what a member refuses it with."""
        try:
            return await self._form(members)
        except (RuntimeError, OSError) as error:
            raise ChannelBroken(str(error)) from error

    async def _form(self, members: Sequence[Sampler]) -> Group:
        started = time.perf_counter()
        self._epoch += 1
        epoch = self._epoch
        with ExitStack() as leaving:
            connections, transports = await self._meet(epoch, members, leaving)
            self._chosen = {member.address: each for member, each in zip(members, transports, strict=True)}
            local_only = not any(transport in COLLECTIVE for transport in transports)
            bucket_bytes = min(self._bucket_bytes, _RING_BUCKET_BYTES) if local_only else self._bucket_bytes
            requests = [
                pb.InitWeightTransferRequest(trainer_id=self._trainer_id, epoch=epoch, backend=transport)
                for transport in transports
            ]
            outlets: list[Outlet] = []
            for transport in ("shm", "cuda_ipc"):
                chosen = [n for n, each in enumerate(transports) if each == transport]
                receivers = [connection for n in chosen if (connection := connections[n]) is not None]
                if chosen:
                    outlets.append(self._make_ring(receivers, [requests[n] for n in chosen], bucket_bytes))
            joining = []
            for backend in COLLECTIVE:
                if chosen := [request for request in requests if request.backend == backend]:
                    joining.append(await self._join(backend, epoch, chosen))
            calls = [
                member.call(member.weights.InitWeightTransfer(request, timeout=self._timeout_s))
                for member, request in zip(members, requests, strict=True)
            ]
            try:
                await all_of(*joining, *calls)
            except BaseException as error:
                if joining:
                    self._rendezvous = None
                if isinstance(error, ChannelBroken):  # the clock may have been set back since this trainer's last run
                    self._epoch = max(self._epoch, error.epoch)
                raise
            outlets += [future.result() for future in joining]
            leaving.pop_all()  # the connections are the rings' now
            for connection, transport in zip(connections, transports, strict=True):
                if connection is not None and transport in COLLECTIVE:
                    connection.close()
        seconds = time.perf_counter() - started
        names = ", ".join(f"{member.address} by {each}" for member, each in zip(members, transports, strict=True))
        logger.info("weight group %d: %s (%.3f s)", epoch, names, seconds)
        return Group(epoch, members, outlets, transports, bucket_bytes)

    def distrust(self, members: Sequence[Sampler]) -> None:
        """After a failure that all members have outlived: what works between GPUs of one machine does not on another
        (containers, drivers, networks), while host memory does on all. So `auto` takes that for them from now on.
        """
        failed = {member.address for member in members if self._chosen.get(member.address) in ON_CUDA}
        if failed and self._channel == "auto":
            logger.warning("from now on weights reach %s through host memory", ", ".join(sorted(failed)))
            self._on_host |= failed

    async def _meet(
        self, epoch: int, members: Sequence[Sampler], leaving: ExitStack
    ) -> tuple[list[socket | None], list[Transport]]:
        """A connection to each member that is on this machine, which `leaving` will close; and everyone's transport."""
        if self._channel in COLLECTIVE:
            return [None] * len(members), [self._channel] * len(members)

        async def meet(member: Sampler) -> tuple[Place, socket | None]:
            request = pb.ProbeWeightTransferRequest(trainer_id=self._trainer_id, epoch=epoch)
            connection = None
            with RingListener() if ring.AVAILABLE else nullcontext() as listener:
                if listener is not None:
                    request.socket = listener.name
                reply = await member.call(member.weights.ProbeWeightTransfer(request, timeout=self._timeout_s))
                if listener is not None and reply.connected:
                    connection = leaving.enter_context(listener.accept())
            return Place(member.address, connection is not None, reply.gpu_uuid), connection

        met = await all_of(*(meet(member) for member in members))
        places, connections = [place for place, _ in met], [connection for _, connection in met]
        return connections, choose(self._channel, places, gpu_uuid=gpu_uuid(self._device), on_host=self._on_host)

    def _make_ring(
        self, receivers: Sequence[socket], requests: Sequence[pb.InitWeightTransferRequest], slot_bytes: int
    ) -> Outlet:
        """Also completes the requests."""
        num_slots = ring.NUM_SLOTS
        if requests[0].backend == "shm":
            memory = make_host_ring(receivers, num_slots=num_slots, slot_bytes=slot_bytes)
        else:
            memory = make_cuda_ring(device=self._device, num_slots=num_slots, slot_bytes=slot_bytes)
        for request in requests:
            handle = cuda_handle(memory) if memory.device == "cuda" else None
            request.ring.CopyFrom(pb.SharedRing(num_slots=num_slots, slot_bytes=slot_bytes, cuda=handle))
        return RingOutlet(memory, receivers)

    async def _join(
        self, backend: Backend, epoch: int, requests: Sequence[pb.InitWeightTransferRequest]
    ) -> asyncio.Future[WeightGroup]:
        """Begins to form the process group. Also completes the requests."""
        rendezvous = self._rendezvous
        if rendezvous is None:
            rendezvous = await in_thread(lambda: _Rendezvous.open(self._host, timeout_s=self._timeout_s))
            self._rendezvous = rendezvous
        world_size = len(requests) + 1
        for rank, request in enumerate(requests, start=1):
            request.store_host, request.store_port = self._host, rendezvous.port
            request.rank, request.world_size = rank, world_size
        return in_thread(
            lambda: WeightGroup.form(
                rendezvous.client,
                epoch=epoch,
                rank=0,
                world_size=world_size,
                backend=backend,
                host=self._host,
                timeout_s=self._timeout_s,
            )
        )
