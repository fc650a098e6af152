"""The thread that reads large messages leaves the compute thread time between two of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tinsmith.cores import Cores
from trainer_service.reader import Reader


@dataclass
class Clock:
    """A clock that only readings and pauses move."""

    now_s: float = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainer_service.reader.time", clock)
    return clock


async def readings(clock: Clock, lengths_s: list[float], *, is_busy: bool) -> list[float]:
    """The times between the end of each reading and the beginning of the next one, in seconds."""
    reader, cores = Reader(), Cores("", most=0, set_threads=lambda _: None)
    began, ended = list[float](), list[float]()

    def read(seconds: float) -> None:
        began.append(clock.now_s)
        clock.now_s += seconds
        ended.append(clock.now_s)

    for seconds in lengths_s:
        await reader.run(lambda seconds=seconds: read(seconds), cores=cores, is_busy=lambda: is_busy)
    return [round(after - before, 6) for after, before in zip(began[1:], ended, strict=False)]


async def test_while_the_compute_thread_is_busy_a_pause_follows_that_is_as_long_as_the_reading(clock: Clock) -> None:
    assert await readings(clock, [0.25, 0.5, 8.0, 0.1], is_busy=True) == [0.25, 0.5, 1.0]


async def test_nothing_waits_while_the_compute_thread_has_nothing_to_do(clock: Clock) -> None:
    assert await readings(clock, [0.25, 0.5, 8.0, 0.1], is_busy=False) == [0.0, 0.0, 0.0]


async def test_a_reading_that_fails_is_followed_by_its_pause(clock: Clock) -> None:
    reader, cores = Reader(), Cores("", most=0, set_threads=lambda _: None)

    def fail() -> None:
        clock.now_s += 0.5
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        await reader.run(fail, cores=cores, is_busy=lambda: True)
    assert await reader.run(clock.monotonic, cores=cores, is_busy=lambda: True) == pytest.approx(101.0)
