"""This sampler's connections to trainers: one for each, of the newest epoch."""

from __future__ import annotations

import socket
from typing import cast

import torch

from sampler_service.threads import in_thread
from tinsmith.errors import FailedPrecondition, InvalidRequest
from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.weight_channel.group import Backend, WeightGroup, join_store
from tinsmith.weight_channel.ring import RingInlet, connect_ring
from tinsmith.weight_channel.ring_memory import gpu_uuid, map_cuda_ring, map_host_ring
from tinsmith.weight_channel.transport import LOCAL, ON_CUDA, Inlet, parse_transport


class ProbedConnections:
    """Connections from ProbeWeightTransfer that wait for their InitWeightTransfer, by trainer."""

    def __init__(self) -> None:
        self._connections: dict[str, tuple[int, socket.socket]] = {}

    def probe(self, request: pb.ProbeWeightTransferRequest, *, device: str) -> pb.ProbeWeightTransferResponse:
        if not request.trainer_id:
            raise InvalidRequest("trainer_id: is empty", field="trainer_id")
        self.forget(request.trainer_id)
        uuid = gpu_uuid(torch.device(device, torch.cuda.current_device())) if device == "cuda" else ""
        if not request.socket:
            return pb.ProbeWeightTransferResponse(gpu_uuid=uuid)
        try:
            self._connections[request.trainer_id] = request.epoch, connect_ring(request.socket)
        except RuntimeError:  # it is elsewhere
            return pb.ProbeWeightTransferResponse(gpu_uuid=uuid)
        return pb.ProbeWeightTransferResponse(connected=True, gpu_uuid=uuid)

    def forget(self, trainer_id: str) -> None:
        if (met := self._connections.pop(trainer_id, None)) is not None:
            met[1].close()

    def take(self, request: pb.InitWeightTransferRequest) -> socket.socket:
        epoch, connection = self._connections.pop(request.trainer_id, (0, None))
        if connection is not None and epoch == request.epoch:
            return connection
        if connection is not None:
            connection.close()
        raise FailedPrecondition(
            f"backend: {request.backend!r} needs the connection of a ProbeWeightTransfer of epoch {request.epoch}"
        )


def check_group(request: pb.InitWeightTransferRequest, *, device: str) -> None:
    """Raises InvalidRequest for what can be seen without waiting for anybody. `device`: "cpu" or "cuda"."""
    if not request.trainer_id:
        raise InvalidRequest("trainer_id: is empty", field="trainer_id")
    transport = parse_transport(request.backend, field="backend")
    if transport in ON_CUDA and device != "cuda":
        raise InvalidRequest(
            f"backend: {transport!r} needs CUDA, and this sampler takes versions on {device}; set the trainer's "
            "channel to auto",
            field="backend",
        )
    if transport in LOCAL:
        if request.ring.num_slots < 1 or request.ring.slot_bytes < 1:
            raise InvalidRequest(
                f"ring: {request.ring.num_slots} slots of {request.ring.slot_bytes} bytes hold nothing", field="ring"
            )
    elif not 1 <= request.rank < request.world_size:
        raise InvalidRequest(f"rank: {request.rank} is outside 1..{request.world_size - 1}", field="rank")


async def join(
    request: pb.InitWeightTransferRequest, probed: ProbedConnections, *, host: str, timeout_s: float
) -> Inlet:
    """Raises FailedPrecondition when the trainer or its memory cannot be reached."""
    if request.backend in LOCAL:
        connection = probed.take(request)
        connection.settimeout(timeout_s)
        work = lambda: _join_ring(request, connection)  # noqa: E731
    else:
        probed.forget(request.trainer_id)
        work = lambda: _join_group(request, host=host, timeout_s=timeout_s)  # noqa: E731
    try:
        return await in_thread(work)
    except RuntimeError as error:
        raise FailedPrecondition(
            f"cannot join group {request.epoch} of trainer {request.trainer_id!r} by {request.backend}: {error}"
        ) from error


def _join_ring(request: pb.InitWeightTransferRequest, connection: socket.socket) -> Inlet:
    try:
        memory = (
            map_cuda_ring(request.ring) if request.backend == "cuda_ipc" else map_host_ring(connection, request.ring)
        )
    except BaseException:
        connection.close()
        raise
    return RingInlet(memory, connection, epoch=request.epoch)


def _join_group(request: pb.InitWeightTransferRequest, *, host: str, timeout_s: float) -> Inlet:
    try:
        store = join_store(request.store_host, request.store_port, timeout_s=timeout_s)
    except RuntimeError as error:
        raise RuntimeError(f"nobody answers at {request.store_host}:{request.store_port}: {error}") from error
    return WeightGroup.form(
        store,
        epoch=request.epoch,
        rank=request.rank,
        world_size=request.world_size,
        backend=cast(Backend, request.backend),
        host=host,
        timeout_s=timeout_s,
    )
