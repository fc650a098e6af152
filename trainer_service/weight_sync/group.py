"""Groups of the weight channel: some samplers and a transport to each. After every error a new group is formed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from socket import socket

import torch
import torch.distributed as dist

from tinsmith.faults import is_lasting_fault
from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.weight_channel import ring
from tinsmith.weight_channel.group import Backend, WeightGroup, join_store, open_store
from tinsmith.weight_channel.ring import RingListener, RingOutlet
from tinsmith.weight_channel.ring_memory import cuda_handle, gpu_uuid, make_cuda_ring, make_host_ring
from tinsmith.weight_channel.transport import COLLECTIVE, ON_CUDA, Outlet, Transport
from trainer_service.config import TrainerConfig
from trainer_service.weight_sync.calls import ChannelBroken, all_of, in_thread
from trainer_service.weight_sync.choice import Channel, SamplerPlace, choose
from trainer_service.weight_sync.samplers import Sampler

logger = logging.getLogger(__name__)

_RING_BUCKET_BYTES = 4 * 1024**2
"""Largest bucket when shared memory reaches all members: its slots then stay in the processor's cache between the copy
in and the copy out."""


@dataclass(frozen=True, slots=True)
class Group:
    """A formed group, ready for transfers."""

    epoch: int
    """Number of the group. It grows with every group, also over restarts of the trainer."""
    members: Sequence[Sampler]
    outlets: Sequence[Outlet]
    """The sending ends, one for each kind of transport in use."""
    transports: Sequence[Transport]
    """The transport to each member."""
    bucket_bytes: int

    def close(self) -> None:
        """Closes the outlets. It may block for a moment."""
        for outlet in self.outlets:
            outlet.close()


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """The TCP store at which the process groups of some samplers meet, and the trainer's own connection to it.

    Both are used for many groups of these samplers, because a new connection may take seconds where DNS is slow: torch
    looks up the name of every peer. When the server object is deleted, all ranks that wait for each other get an error
    at once.
    """

    server: dist.TCPStore
    client: dist.TCPStore
    port: int

    @classmethod
    def open(cls, host: str, *, timeout_s: float) -> _Rendezvous:
        server = open_store(host, timeout_s=timeout_s)
        return cls(server, join_store(host, server.port, timeout_s=timeout_s), server.port)


class Former:
    """Forms groups. Two at a time have no sampler in common."""

    def __init__(self, config: TrainerConfig, *, trainer_id: str, device: torch.device) -> None:
        self._trainer_id = trainer_id
        self._device = device
        self._channel: Channel = config.channel
        self._host = config.channel_host
        self._bucket_bytes = config.channel_bucket_bytes
        self._timeout_s = config.channel_timeout_s
        self._epoch = time.time_ns() // 1_000_000  # grows over restarts of this trainer, too
        self._rendezvous: dict[frozenset[str], _Rendezvous] = {}
        """By the addresses of the samplers that meet there."""
        self._on_host: set[str] = set()
        """Addresses of members that GPU memory has failed to reach; see `distrust`."""
        self._chosen: dict[str, Transport] = {}
        """Transport of the last group of each sampler, by address."""

    def close(self) -> None:
        self._rendezvous.clear()

    def forget(self, members: Collection[Sampler]) -> None:
        """Frees what is kept for the next group with any of these samplers."""
        gone = _addresses(members)
        for addresses in [addresses for addresses in self._rendezvous if addresses & gone]:
            del self._rendezvous[addresses]

    async def form(self, members: Sequence[Sampler]) -> Group:
        """Forms a group of these samplers. Raises ChannelBroken, the error of a member that refuses, or that of a
        device which can compute no more."""
        try:
            return await self._form(members)
        except (RuntimeError, OSError) as error:
            if is_lasting_fault(error):
                raise
            raise ChannelBroken(str(error)) from error

    async def _form(self, members: Sequence[Sampler]) -> Group:
        started = time.perf_counter()
        self._epoch += 1
        epoch = self._epoch
        with ExitStack() as leaving:
            connections, transports = await self._meet(epoch, members, leaving)
            self._chosen |= {member.address: each for member, each in zip(members, transports, strict=True)}
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
                    joining.append(await self._join(backend, epoch, chosen, members))
            calls = [
                member.call(member.weights.InitWeightTransfer(request, timeout=self._timeout_s))
                for member, request in zip(members, requests, strict=True)
            ]
            try:
                await all_of(*joining, *calls)
            except BaseException as error:
                if joining:
                    self._rendezvous.pop(_addresses(members), None)
                if isinstance(error, ChannelBroken):  # a member may know a higher epoch, if the clock was set back
                    self._epoch = max(self._epoch, error.epoch)
                raise
            outlets += [future.result() for future in joining]
            leaving.pop_all()  # the rings own the connections now
            for connection, transport in zip(connections, transports, strict=True):
                if connection is not None and transport in COLLECTIVE:
                    connection.close()
        seconds = time.perf_counter() - started
        names = ", ".join(f"{member.address} by {each}" for member, each in zip(members, transports, strict=True))
        logger.info("weight group %d: %s (%.3f s)", epoch, names, seconds)
        return Group(epoch, members, outlets, transports, bucket_bytes)

    def distrust(self, members: Sequence[Sampler]) -> None:
        """Makes `auto` use host memory for these members from now on. Called after a failure that all members survived.

        Transport between GPUs may fail on some machines, because of containers, drivers or networks. Host memory works
        on all.
        """
        failed = {member.address for member in members if self._chosen.get(member.address) in ON_CUDA}
        if failed and self._channel == "auto":
            logger.warning("from now on weights reach %s through host memory", ", ".join(sorted(failed)))
            self._on_host |= failed

    async def _meet(
        self, epoch: int, members: Sequence[Sampler], leaving: ExitStack
    ) -> tuple[list[socket | None], list[Transport]]:
        """Probes the members. Returns a connection to each member on this machine (None for others), which `leaving`
        will close, and the transport to each."""
        if self._channel in COLLECTIVE:
            return [None] * len(members), [self._channel] * len(members)

        async def meet(member: Sampler) -> tuple[SamplerPlace, socket | None]:
            request = pb.ProbeWeightTransferRequest(trainer_id=self._trainer_id, epoch=epoch)
            connection = None
            with RingListener() if ring.AVAILABLE else nullcontext() as listener:
                if listener is not None:
                    request.socket = listener.name
                reply = await member.call(member.weights.ProbeWeightTransfer(request, timeout=self._timeout_s))
                if listener is not None and reply.connected:
                    connection = leaving.enter_context(listener.accept())
            return SamplerPlace(member.address, connection is not None, reply.gpu_uuid), connection

        met = await all_of(*(meet(member) for member in members))
        places, connections = [place for place, _ in met], [connection for _, connection in met]
        return connections, choose(self._channel, places, gpu_uuid=gpu_uuid(self._device), on_host=self._on_host)

    def _make_ring(
        self, receivers: Sequence[socket], requests: Sequence[pb.InitWeightTransferRequest], slot_bytes: int
    ) -> Outlet:
        """Makes the shared ring for these receivers, and fills it into their requests."""
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
        self,
        backend: Backend,
        epoch: int,
        requests: Sequence[pb.InitWeightTransferRequest],
        members: Sequence[Sampler],
    ) -> asyncio.Future[WeightGroup]:
        """Begins to form the process group, and fills the members' ranks into their requests."""
        rendezvous = self._rendezvous.get(_addresses(members))
        if rendezvous is None:
            rendezvous = await in_thread(lambda: _Rendezvous.open(self._host, timeout_s=self._timeout_s))
            self._rendezvous[_addresses(members)] = rendezvous
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


def _addresses(members: Collection[Sampler]) -> frozenset[str]:
    return frozenset(member.address for member in members)
