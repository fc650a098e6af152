"""How rank 0 of several ends when it fails: at once, and with its rank and the cause in the last line of its log."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from trainer_service import service
from trainer_service.config import TrainerConfig


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            SystemExit("cannot load m: a file is damaged"),
            "cannot load m: a file is damaged",
        ),
        (MemoryError("no memory"), "MemoryError: no memory"),
    ],
    ids=["expected", "unexpected"],
)
def test_rank_0_ends_as_the_other_ranks_do(monkeypatch: pytest.MonkeyPatch, error: BaseException, reason: str) -> None:
    """A regular exit waits for threads, and meanwhile the others take this rank for stopped, and kill it."""

    async def serve(*_: object) -> None:
        raise error

    group = Mock()
    monkeypatch.setattr(service.Place, "of", lambda _: SimpleNamespace(alone=False, rank=0, world_size=2))
    monkeypatch.setattr(service.RankGroup, "join", lambda *_, **__: group)
    monkeypatch.setattr(service, "_prepare_process", Mock())
    monkeypatch.setattr(service.process, "begin", Mock())
    monkeypatch.setattr(service.sys, "setswitchinterval", Mock())
    monkeypatch.setattr(service, "serve", serve)
    service.run(TrainerConfig(base_model="m"))
    group.end.assert_called_once_with(reason)
