"""Versions between two processes of one GPU by CUDA IPC, and between two GPUs by NCCL.

python -m pytest -m gpu tests/gpu/test_weight_channel.py -rs
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue

import pytest
import torch

from tests.gpu.device import MARKS, ONLY_CUDA
from tinsmith.v1 import weight_sync_pb2 as pb
from tinsmith.weight_channel.buckets import receive, send
from tinsmith.weight_channel.group import WeightGroup, join_store, open_store
from tinsmith.weight_channel.ring import RingInlet, RingListener, RingOutlet, connect_ring
from tinsmith.weight_channel.ring_memory import cuda_handle, make_cuda_ring, map_cuda_ring

pytestmark = [*MARKS, ONLY_CUDA]

NUMEL = 3_000_001
BUCKET_BYTES = 1 << 20
TIMEOUT_S = 60.0


def _flat() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))


def _receive_ring(name: str, handles: Queue[bytes], results: Queue[tuple[str, bool]]) -> None:
    trainer = connect_ring(name)
    torch.cuda.init()
    results.put(("connected", True))
    ring = pb.SharedRing.FromString(handles.get(timeout=TIMEOUT_S))
    inlet = RingInlet(map_cuda_ring(ring), trainer, epoch=1)
    _report(inlet, results)


def _receive_nccl(port: int, results: Queue[tuple[str, bool]]) -> None:
    torch.cuda.set_device(1)
    _report(_form(port, rank=1), results)


def _report(inlet: RingInlet | WeightGroup, results: Queue[tuple[str, bool]]) -> None:
    for device in ("cuda", "cpu"):
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.empty(NUMEL, device=device)
            sum_ = receive(inlet, flat, dtype=dtype, bucket_bytes=BUCKET_BYTES)
            results.put((sum_, torch.equal(flat.cpu(), _flat().to(dtype).float())))


def _form(port: int, *, rank: int) -> WeightGroup:
    store = join_store("127.0.0.1", port, timeout_s=TIMEOUT_S)
    return WeightGroup.form(
        store, epoch=1, rank=rank, world_size=2, backend="nccl", host="127.0.0.1", timeout_s=TIMEOUT_S
    )


def _send_all(outlet: RingOutlet | WeightGroup, results: Queue[tuple[str, bool]]) -> None:
    for _ in ("cuda", "cpu"):
        for dtype in (torch.float32, torch.bfloat16):
            sum_ = send([outlet], _flat(), dtype=dtype, bucket_bytes=BUCKET_BYTES)
            assert results.get(timeout=TIMEOUT_S) == (sum_, True)


def test_a_ring_in_gpu_memory() -> None:
    spawn = multiprocessing.get_context("spawn")
    handles, results = spawn.Queue(), spawn.Queue()
    with RingListener() as listener:
        other = spawn.Process(target=_receive_ring, args=(listener.name, handles, results))
        other.start()
        assert results.get(timeout=TIMEOUT_S) == ("connected", True)
        receiver = listener.accept()
    memory = make_cuda_ring(device=torch.device("cuda", 0), num_slots=4, slot_bytes=BUCKET_BYTES)
    ring = pb.SharedRing(num_slots=4, slot_bytes=BUCKET_BYTES, cuda=cuda_handle(memory))
    handles.put(ring.SerializeToString())
    _send_all(RingOutlet(memory, [receiver]), results)
    other.join(TIMEOUT_S)
    assert other.exitcode == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_nccl_between_two_gpus() -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    store = open_store("127.0.0.1", timeout_s=TIMEOUT_S)
    other = spawn.Process(target=_receive_nccl, args=(store.port, results))
    other.start()
    _send_all(_form(store.port, rank=0), results)
    other.join(TIMEOUT_S)
    assert other.exitcode == 0
