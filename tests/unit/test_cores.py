"""Threads of each service, by a shared page of several services."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith.cores import Cores, make_page, yield_to_event_loops

Place = Callable[..., Cores]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """8 cores: a trainer with 4 of them, two samplers with 2 each."""
    path = tmp_path / "state" / "cores"
    make_page(path, cores=8, shares=[4, 2, 2])
    return path


@pytest.fixture
def place(page: Path) -> Place:
    def made(number: int, *, most: int = 0, **settings: Any) -> Cores:
        return Cores(f"{page}:{number}", most=most, set_threads=lambda _: None, **settings)

    return made


def test_a_service_has_its_share_while_it_loads_and_all_cores_while_it_computes_alone(place: Place) -> None:
    trainer = place(0)
    assert trainer.threads == trainer.share == 4
    trainer.begin()
    assert trainer.threads == 8


def test_those_that_compute_divide_the_cores_by_their_shares_from_their_next_step_on(place: Place) -> None:
    trainer, one, other = place(0), place(1), place(2)
    trainer.begin()
    one.begin()
    assert (trainer.threads, one.threads) == (8, 2)
    trainer.begin()
    assert trainer.threads == 5
    other.begin()
    for service in (trainer, one, other):
        service.begin()
    assert [service.threads for service in (trainer, one, other)] == [4, 2, 2]
    trainer.end()
    one.begin()
    assert one.threads == 4


def test_nobody_has_fewer_than_one_thread_or_more_than_it_may_use(place: Place, page: Path) -> None:
    make_page(page, cores=2, shares=[1, 1, 1])
    services = [place(number, most=1 if number == 2 else 0) for number in range(3)]
    for service in services * 2:
        service.begin()
    assert [service.threads for service in services] == [1, 1, 1]
    for service in services[:2]:
        service.end()
    services[2].begin()
    assert services[2].threads == 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which readers have a core; a test sets it."""
    now = [time.monotonic()]
    monkeypatch.setattr("tinsmith.cores.time.monotonic", lambda: now[0])
    return now


def test_a_reader_of_a_large_body_takes_a_core_from_all_that_compute(place: Place, now: list[float]) -> None:
    trainer, one, gateway = place(0), place(1), place(2)
    trainer.begin()
    with gateway.reading(), trainer.reading():
        trainer.begin()
        assert trainer.threads == 6
        one.begin()
        trainer.begin()
        assert (trainer.threads, one.threads) == (4, 2)
        now[0] += 0.03
    one.end()
    trainer.begin()
    assert trainer.threads == 6  # the next service may be about to read the body
    now[0] += 0.3
    trainer.begin()
    assert trainer.threads == 8


def test_a_short_step_of_reading_frees_its_core_at_once(place: Place) -> None:
    trainer, gateway = place(0), place(2)
    with gateway.reading():
        trainer.begin()
        assert trainer.threads == 7
    trainer.begin()
    assert trainer.threads == 8


def test_readers_leave_one_thread(place: Place, page: Path) -> None:
    make_page(page, cores=2, shares=[1, 1, 0])
    trainer, sampler, gateway = place(0), place(1), place(2)
    with gateway.reading(), trainer.reading(), sampler.reading():
        trainer.begin()
        assert trainer.threads == 1


def test_a_reader_that_was_killed_takes_nothing_in_the_end(page: Path, place: Place, now: list[float]) -> None:
    code = "import sys, os; from tinsmith.cores import Cores; "
    code += "step = Cores(sys.argv[1], most=1, set_threads=lambda _: None).reading(); step.__enter__(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, f"{page}:2"], check=True)
    trainer = place(0)
    trainer.begin()
    assert trainer.threads == 7
    now[0] += 60
    trainer.begin()
    assert trainer.threads == 8


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")
def test_a_thread_that_yields_passes_its_priority_on_and_leaves_others_theirs() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def computing() -> tuple[int, int]:
        yield_to_event_loops()
        with ThreadPoolExecutor(1) as pool:
            return niceness(), pool.submit(niceness).result()

    before = niceness()
    with ThreadPoolExecutor(1) as pool:
        mine, started = pool.submit(computing).result()
    assert mine == started == min(19, before + 1)
    assert niceness() == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")
def test_a_thread_that_may_not_yield_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("tinsmith.cores.os.setpriority", refused)
    yield_to_event_loops()


def test_a_pass_of_few_tokens_has_fewer_threads(place: Place) -> None:
    trainer = place(0)
    trainer.tokens_per_thread = 16
    threads = []
    for num_tokens in (0, 8, 31, 32, 100, 1000):
        trainer.begin(num_tokens=num_tokens)
        threads.append(trainer.threads)
    assert threads == [1, 1, 1, 2, 6, 8]
    trainer.begin()
    assert trainer.threads == 8  # what is no pass


def test_a_fixed_number_of_threads_does_not_depend_on_a_pass(place: Place) -> None:
    trainer = place(0, fixed=True)
    trainer.tokens_per_thread = 16
    trainer.begin(num_tokens=8)
    assert trainer.threads == 4


def test_work_that_others_do_at_the_same_time_has_the_share_of_its_service(place: Place) -> None:
    trainer = place(0)
    trainer.begin(num_tokens=1000, is_shared=True)
    assert trainer.threads == 4
    trainer.begin(num_tokens=1000)
    assert trainer.threads == 8


def test_threads_are_set_when_their_number_changes_and_only_then(page: Path) -> None:
    said: list[int] = []
    service = Cores(f"{page}:0", most=0, set_threads=said.append)
    for _ in range(3):
        service.begin()
    service.end()
    assert said == [4, 8]


def test_ranks_divide_the_threads_of_their_service_and_rank_0_speaks_for_them(place: Place) -> None:
    first, second = place(0, processes=2), place(0, processes=2, announces=False)
    second.begin()
    sampler = place(1)
    sampler.begin()
    assert (second.threads, sampler.threads) == (4, 8)
    first.begin()
    sampler.begin()
    second.begin()
    assert (first.threads, second.threads, sampler.threads) == (2, 2, 2)
    second.end()
    sampler.begin()
    assert sampler.threads == 2


@pytest.mark.parametrize(("most", "threads"), [(0, 4), (6, 6)])
def test_a_fixed_number_never_changes_and_the_others_make_room(place: Place, most: int, threads: int) -> None:
    fixed, other = place(0, most=most, fixed=True), place(1)
    fixed.begin()
    other.begin()
    assert (fixed.threads, other.threads) == (threads, 2)
    other.end()
    fixed.begin()
    assert fixed.threads == threads


def test_one_that_died_while_it_computed_takes_no_cores(place: Place, page: Path) -> None:
    code = f"from tinsmith.cores import Cores; Cores('{page}:1', most=0, set_threads=print).begin()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert np.fromfile(page, np.int32)[5] not in (0, os.getpid())
    trainer = place(0)
    trainer.begin()
    assert trainer.threads == 8
    place(1)  # it is back, and loads
    assert np.fromfile(page, np.int32)[5] == 0


def test_a_log_says_how_many_threads_there_are(place: Place) -> None:
    assert str(place(0)) == "up to 8 threads, and 4 while all services compute"
    assert str(place(1, most=1)) == "up to 1 threads, and 1 while all services compute"
    assert str(place(0, processes=2)) == "up to 4 threads, and 2 while all services compute"
    assert str(place(0, fixed=True)) == "4 threads, always"
    assert str(Cores("", most=0, set_threads=print)) == "a default number of threads, always"


def test_without_a_page_the_number_of_threads_is_what_was_set() -> None:
    said: list[int] = []
    service = Cores("", most=3, set_threads=said.append)
    service.begin()
    service.end()
    assert (service.threads, service.share, said) == (3, 3, [3])
    assert Cores("", most=0, set_threads=said.append).threads == 0
    assert said == [3]


@pytest.mark.parametrize("address", ["{page}", "{page}:3", "{page}:x", "{page}:-1", "{page}.not:0", "0"])
def test_an_unusable_page_is_refused_by_name(page: Path, address: str) -> None:
    with pytest.raises(ValueError, match="cores_page: "):
        Cores(address.format(page=page), most=0, set_threads=print)
