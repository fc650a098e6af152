"""How NCCL is used, with a stand-in for it: no build without CUDA has it."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tinsmith.weight_channel.group import WeightGroup
from tinsmith.weight_channel.transport import bucket_timeout_s

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class _Nccl:
    """dist.ProcessGroupNCCL"""

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, world_size: int, options: Any) -> None:
        self.blocking_wait = os.environ.get(BLOCKING_WAIT)
        self.timeout = options._timeout
        self.waited: list[timedelta] = []
        self.aborted = threading.Event()

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return SimpleNamespace(wait=self.waited.append)

    def abort(self) -> None:
        self.aborted.set()
        raise RuntimeError("aborting took too long")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> WeightGroup:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _Nccl, raising=False)
    return WeightGroup.form(
        dist.HashStore(), epoch=1, rank=1, world_size=2, backend="nccl", host="127.0.0.1", timeout_s=60
    )


@pytest.mark.parametrize("before", [None, "0"])
def test_a_sampler_that_is_lost_ends_no_process(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """Without this variable torch watches each group by a thread, which ends the process after the first error."""
    if before is None:
        monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    else:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _Nccl, raising=False)
    group = WeightGroup.form(
        dist.HashStore(), epoch=1, rank=1, world_size=2, backend="nccl", host="127.0.0.1", timeout_s=60
    )
    nccl: Any = group.process_group
    assert nccl.blocking_wait == "1"
    assert os.environ.get(BLOCKING_WAIT) == before  # the ranks of a trainer have groups, too


def test_a_bucket_is_waited_for_as_long_as_its_size_allows(group: WeightGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.device] = []
    stream = lambda device: SimpleNamespace(synchronize=lambda: copied.append(device))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    device = torch.device("cuda", 0)
    bucket: Any = SimpleNamespace(is_cuda=True, nbytes=64 << 20, device=device)
    wait = group.receive(bucket)
    assert copied == []
    wait()
    nccl: Any = group.process_group
    assert nccl.waited == [timedelta(seconds=bucket_timeout_s(64 << 20))]
    assert copied == [device]


def test_a_group_that_is_given_up_leaves_no_broadcast_on_the_gpu(group: WeightGroup) -> None:
    group.close()
    nccl: Any = group.process_group
    assert nccl.aborted.wait(10)
