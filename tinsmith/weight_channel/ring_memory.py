"""The memory of a ring, made by the trainer and mapped by the receivers. Host memory is a memfd; GPU memory is a CUDA
IPC handle.

tests/gpu/test_weight_channel.py runs the CUDA half on a GPU. The tests for machines without one replace the two torch
calls.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith.v1 import weight_sync_pb2 as pb

_MFD_NOEXEC_SEAL = 8
"""MFD_NOEXEC_SEAL, which some systems require: the memory can never be executed. Python's `os` has no name for it."""


@dataclass(frozen=True, slots=True)
class RingMemory:
    """The memory of a ring, divided into slots of equal size."""

    buffer: Tensor
    """uint8 [num_slots * slot_bytes], on the host or a GPU."""
    num_slots: int
    slot_bytes: int

    @property
    def device(self) -> str:
        return self.buffer.device.type

    def slot(self, number: int) -> Tensor:
        """The slot of bucket `number`, counted since the ring was made."""
        begin = number % self.num_slots * self.slot_bytes
        return self.buffer[begin : begin + self.slot_bytes]


def make_host_ring(receivers: Sequence[socket.socket], *, num_slots: int, slot_bytes: int) -> RingMemory:
    """New memory, whose descriptor is sent to every receiver. The system allocates its pages at their first use. Raises
    OSError."""
    size = num_slots * slot_bytes
    descriptor = _memfd()
    try:
        os.ftruncate(descriptor, size)
        # Seals the size: a receiver that reads mapped memory which was cut off is killed.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        for receiver in receivers:
            socket.send_fds(receiver, [b"ring"], [descriptor])
        return RingMemory(_mapped(descriptor, size), num_slots, slot_bytes)
    finally:
        os.close(descriptor)


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("tinsmith-weights", flags | _MFD_NOEXEC_SEAL)
    except OSError:  # Linux before 6.3
        return os.memfd_create("tinsmith-weights", flags)


def map_host_ring(trainer: socket.socket, ring: pb.SharedRing) -> RingMemory:
    """Maps the memory whose descriptor the trainer sends. Raises RuntimeError if no descriptor comes, or if its memory
    does not fit `ring`."""
    size = ring.num_slots * ring.slot_bytes
    try:
        _, descriptors, _, _ = socket.recv_fds(trainer, 16, 1)
    except OSError as error:
        raise RuntimeError(f"the ring's memory did not come: {error}") from error
    if not descriptors:
        raise RuntimeError("the ring's memory did not come: the trainer has closed the connection")
    (descriptor,) = descriptors
    try:
        if os.fstat(descriptor).st_size != size or size == 0:
            raise RuntimeError(
                f"the ring's memory has {os.fstat(descriptor).st_size} bytes, not {ring.num_slots} x {ring.slot_bytes}"
            )
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise RuntimeError("the ring's memory could shrink: it is not sealed")
        return RingMemory(_mapped(descriptor, size), ring.num_slots, ring.slot_bytes)
    except OSError as error:
        raise RuntimeError(f"the ring's memory cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def make_cuda_ring(*, device: torch.device, num_slots: int, slot_bytes: int) -> RingMemory:
    """New memory on a GPU. Raises RuntimeError if the GPU has too little left."""
    return RingMemory(torch.empty(num_slots * slot_bytes, dtype=torch.uint8, device=device), num_slots, slot_bytes)


def cuda_handle(memory: RingMemory) -> pb.CudaIpcHandle:
    """A handle for one receiver. Each receiver needs its own, because torch counts the mappings of each handle."""
    storage: Any = memory.buffer.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, sync = storage._share_cuda_()
    return pb.CudaIpcHandle(
        gpu_uuid=gpu_uuid(memory.buffer.device),
        handle=handle,
        size_bytes=size,
        offset_bytes=offset,
        ref_counter_handle=counter,
        ref_counter_offset=counter_offset,
        event_handle=event,
        event_sync_required=sync,
    )


def map_cuda_ring(ring: pb.SharedRing) -> RingMemory:
    """Maps the memory of a handle. Raises RuntimeError if the memory is on another GPU, is smaller than `ring` says, or
    cannot be mapped."""
    size, cuda = ring.num_slots * ring.slot_bytes, ring.cuda
    device = torch.device("cuda", torch.cuda.current_device())
    if gpu_uuid(device) != cuda.gpu_uuid:
        raise RuntimeError(f"the ring's memory is on GPU {cuda.gpu_uuid}, this process on {gpu_uuid(device)}")
    if cuda.size_bytes < size or size == 0:
        raise RuntimeError(
            f"the ring's memory has {cuda.size_bytes} bytes, too few for {ring.num_slots} x {ring.slot_bytes}"
        )
    make: Any = torch.UntypedStorage._new_shared_cuda
    storage = make(
        device.index,
        cuda.handle,
        cuda.size_bytes,
        cuda.offset_bytes,
        cuda.ref_counter_handle,
        cuda.ref_counter_offset,
        cuda.event_handle,
        cuda.event_sync_required,
    )
    buffer = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]
    return RingMemory(buffer, ring.num_slots, ring.slot_bytes)


def gpu_uuid(device: torch.device) -> str:
    """UUID of a GPU; empty for a CPU."""
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)
