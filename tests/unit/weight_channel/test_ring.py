"""Rings of shared memory: two processes, the faults of either, and CUDA's handles with a stand-in for CUDA."""

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.weight_channel import ring_memory
from tinsmith.weight_channel.buckets import bucket_slices, checksum, receive, send
from tinsmith.weight_channel.ring import RingInlet, RingListener, RingOutlet, connect_ring
from tinsmith.weight_channel.ring_memory import (
    RingMemory,
    cuda_handle,
    make_host_ring,
    map_cuda_ring,
    map_host_ring,
)

SLOT_BYTES = 4096
RING = pb.SharedRing(num_slots=3, slot_bytes=SLOT_BYTES)
FLAT = torch.randn(20_000, generator=torch.Generator().manual_seed(1))


def meet() -> tuple[socket.socket, socket.socket]:
    """The trainer's connection, and the receiver's."""
    with RingListener() as listener:
        receiver = connect_ring(listener.name)
        return listener.accept(), receiver


@contextmanager
def ring(num_receivers: int = 1) -> Iterator[tuple[RingOutlet, list[RingInlet]]]:
    met = [meet() for _ in range(num_receivers)]
    trainers = [trainer for trainer, _ in met]
    memory = make_host_ring(trainers, num_slots=RING.num_slots, slot_bytes=SLOT_BYTES)
    with closing(RingOutlet(memory, trainers)) as outlet:
        inlets = [RingInlet(map_host_ring(receiver, RING), receiver, epoch=1) for _, receiver in met]
        yield outlet, inlets
        for inlet in inlets:
            inlet.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_receiver_gets_the_buffer_bit_for_bit_again_and_again(dtype: torch.dtype) -> None:
    with ring(3) as (outlet, inlets), ThreadPoolExecutor(3) as threads:
        for n in range(3):
            flat = FLAT + n
            buffers = [torch.empty_like(flat) for _ in inlets]
            receiving = [
                threads.submit(receive, inlet, buffer, dtype=dtype, bucket_bytes=SLOT_BYTES)
                for inlet, buffer in zip(inlets, buffers, strict=True)
            ]
            sum_ = send([outlet], flat, dtype=dtype, bucket_bytes=SLOT_BYTES)
            assert [each.result() for each in receiving] == [sum_] * 3
            assert sum_ == checksum(flat, dtype)
            for buffer in buffers:
                assert torch.equal(buffer, flat.to(dtype).float())


def test_a_slot_is_not_used_again_before_the_slowest_receiver_has_emptied_it() -> None:
    parts = [FLAT[part] for part in bucket_slices(FLAT.numel(), itemsize=4, bucket_bytes=SLOT_BYTES)]
    sent: list[int] = []

    def send_all(outlet: RingOutlet) -> None:
        for n, part in enumerate(parts):
            outlet.send(part)
            sent.append(n)

    with ThreadPoolExecutor(1) as threads, ring(2) as (outlet, (quick, slow)):
        threads.submit(send_all, outlet)
        buffer = torch.empty(SLOT_BYTES // 4)
        for _ in range(RING.num_slots):
            quick.receive(buffer)()
        assert select.select([quick._trainer], [], [], 0.2)[0] == [], "one receiver alone frees no slot"
        assert len(sent) == RING.num_slots
        slow.receive(buffer)()
        assert torch.equal(buffer, parts[0])
        quick.receive(buffer)()
        assert torch.equal(buffer, parts[3])


_RECEIVE_TWO_AND_DIE = """
import os, signal, sys, torch
from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.weight_channel.ring import RingInlet, connect_ring
from tinsmith.weight_channel.ring_memory import map_host_ring

name, num_slots, slot_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
trainer = connect_ring(name)
inlet = RingInlet(map_host_ring(trainer, pb.SharedRing(num_slots=num_slots, slot_bytes=slot_bytes)), trainer, epoch=1)
for _ in range(2):
    inlet.receive(torch.empty(slot_bytes // 4))()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_wakes_the_sender_at_once_and_leaves_nothing() -> None:
    before = _shared_memory()
    with RingListener() as listener:
        arguments = [listener.name, str(RING.num_slots), str(SLOT_BYTES)]
        process = subprocess.Popen([sys.executable, "-c", _RECEIVE_TWO_AND_DIE, *arguments])
        trainer = _wait(listener.accept)
    outlet = RingOutlet(make_host_ring([trainer], num_slots=RING.num_slots, slot_bytes=SLOT_BYTES), [trainer])
    with closing(outlet), pytest.raises(RuntimeError, match="the other end of the ring"):
        send([outlet], FLAT, dtype=torch.float32, bucket_bytes=SLOT_BYTES)
    assert process.wait() == -signal.SIGKILL
    assert _shared_memory() == before


def _wait(call: Callable[[], socket.socket]) -> socket.socket:
    for _ in range(1000):
        try:
            return call()
        except RuntimeError:
            time.sleep(0.01)
    raise AssertionError("nobody has connected")


def _shared_memory() -> set[str]:
    return {str(file) for file in Path("/dev/shm").iterdir() if file.is_file()}


def test_a_trainer_that_gives_up_wakes_its_receivers_which_then_know() -> None:
    with ring() as (outlet, (inlet,)):
        inlet.check()
        threading.Timer(0.05, outlet.close).start()
        with pytest.raises(RuntimeError, match="the other end of the ring has closed it"):
            inlet.receive(torch.empty(4))()
        with pytest.raises(RuntimeError, match="the trainer has given group 1 up"):
            inlet.check()


def test_a_bucket_of_another_size_than_was_announced_is_an_error() -> None:
    with ring() as (outlet, (inlet,)):
        outlet.send(FLAT[:10])
        with pytest.raises(RuntimeError, match="bucket 0 of 40 bytes came, instead of bucket 0 of 44"):
            inlet.receive(torch.empty(11))()
        with pytest.raises(RuntimeError, match="a bucket of 80000 bytes is larger than a slot of 4096"):
            outlet.send(FLAT)


def _descriptor(size: int, *, sealed: bool) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@pytest.mark.parametrize(
    ("size", "sealed", "message"),
    [
        (3 * SLOT_BYTES, False, "the ring's memory could shrink"),
        (2 * SLOT_BYTES, True, "the ring's memory has 8192 bytes, not 3 x 4096"),
        (4 * SLOT_BYTES, True, "the ring's memory has 16384 bytes, not 3 x 4096"),
        (None, True, "the ring's memory did not come"),
    ],
)
def test_memory_that_is_not_what_was_announced_is_not_mapped(size: int | None, sealed: bool, message: str) -> None:
    trainer, receiver = meet()
    with trainer, receiver:
        if size is None:
            trainer.shutdown(socket.SHUT_RDWR)
        else:
            descriptor = _descriptor(size, sealed=sealed)
            socket.send_fds(trainer, [b"ring"], [descriptor])
            os.close(descriptor)
        with pytest.raises(RuntimeError, match=message):
            map_host_ring(receiver, RING)


def test_another_user_or_another_socket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no trainer listens"):
        connect_ring("tinsmith-weights-0000")
    with pytest.raises(RuntimeError, match="'/run/dbus' is no socket of a trainer"):
        connect_ring("/run/dbus")
    with RingListener() as listener:
        with pytest.raises(RuntimeError, match="no receiver has connected"):
            listener.accept()
        with connect_ring(listener.name), monkeypatch.context() as patch:
            ours = os.geteuid()
            patch.setattr(os, "geteuid", lambda: ours + 1)
            with pytest.raises(RuntimeError, match=f"belongs to user {ours}, this process to user {ours + 1}"):
                listener.accept()
            with pytest.raises(RuntimeError, match="belongs to user"):
                connect_ring(listener.name)


class _CudaTensor:
    """Stands for a ring on a GPU, and for its storage: what torch would say of them."""

    device = torch.device("cuda", 0)

    def untyped_storage(self) -> Any:
        return self

    def _share_cuda_(self) -> tuple[Any, ...]:
        return 0, b"\x00handle", 3 * SLOT_BYTES, 512, b"/counter", 7, b"\xffevent", True


def test_a_cuda_ring_is_opened_with_the_fields_that_torch_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(3 * SLOT_BYTES, dtype=torch.uint8)
    opened: list[tuple[Any, ...]] = []

    def open_(*fields: Any) -> torch.UntypedStorage:
        opened.append(fields)
        return memory.untyped_storage()

    monkeypatch.setattr(ring_memory, "gpu_uuid", lambda device: "GPU-1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_, raising=False)
    there: Any = _CudaTensor()
    handle = pb.CudaIpcHandle.FromString(cuda_handle(RingMemory(there, 3, SLOT_BYTES)).SerializeToString())
    mapped = map_cuda_ring(pb.SharedRing(num_slots=3, slot_bytes=SLOT_BYTES, cuda=handle))
    assert opened == [(3, b"\x00handle", 3 * SLOT_BYTES, 512, b"/counter", 7, b"\xffevent", True)]
    memory[SLOT_BYTES : 2 * SLOT_BYTES] = 9
    assert mapped.slot(4).eq(9).all()
    assert mapped.slot(0).eq(0).all()

    with pytest.raises(RuntimeError, match="has 12288 bytes, too few for 4 x 4096"):
        map_cuda_ring(pb.SharedRing(num_slots=4, slot_bytes=SLOT_BYTES, cuda=handle))
    handle.gpu_uuid = "GPU-2"
    with pytest.raises(RuntimeError, match="on GPU GPU-2, this process on GPU-1"):
        map_cuda_ring(pb.SharedRing(num_slots=3, slot_bytes=SLOT_BYTES, cuda=handle))
