"""Ranks that are lost while no other rank waits for them with a limit."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from trainer_service.ranks import roll_call
from trainer_service.ranks.roll_call import RollCall


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    monkeypatch.setattr(roll_call, "_BEAT_S", 0.05)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))


class Ended:
    """Keeps the reason with which `RollCall.start` ends a rank."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reason = ""

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.event.set()


def test_a_rank_that_gives_no_more_signs_of_life_ends_the_others(store: dist.TCPStore) -> None:
    ended = [Ended() for _ in range(3)]
    calls = [RollCall(store, rank=rank, world_size=3, longest_s=2.0) for rank in range(3)]
    calls[0].start(ended[0])
    calls[2].start(ended[2])
    store.set("roll-call/1", '["machine", 1, 1, 7, 0]')  # its last one
    began = time.monotonic()
    for rank in (0, 2):
        assert ended[rank].event.wait(20)
        assert ended[rank].reason == "rank 1 gave no sign of life for 2 s (twice --rank-timeout-s)"
    assert time.monotonic() - began >= 2


def test_ranks_that_give_signs_of_life_and_one_that_has_not_begun_end_nobody(store: dist.TCPStore) -> None:
    ended = [Ended(), Ended()]
    for rank, end in enumerate(ended):
        RollCall(store, rank=rank, world_size=3, longest_s=3.0).start(end)
    assert not ended[0].event.wait(5)
    assert not ended[1].event.is_set()


def test_a_rank_whose_store_is_gone_ends(monkeypatch: pytest.MonkeyPatch, store: dist.TCPStore) -> None:
    ended = Ended()
    call = RollCall(store, rank=0, world_size=1, longest_s=1.0)
    monkeypatch.setattr(call, "_store", Gone())
    call.start(ended)
    assert ended.event.wait(20)
    assert ended.reason == "the store of the ranks has not answered for 1 s (twice --rank-timeout-s)"


class Gone:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")
