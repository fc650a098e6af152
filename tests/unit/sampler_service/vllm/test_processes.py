"""Processes that start each other as vLLM's do: one below this one, another below that."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[4]
CODE = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
from sampler_service.vllm.processes import die_with_parent, kill_all_below

def worker(depth):
    if depth:
        start(depth - 1)
    die_with_parent()
    memory = SharedMemory(create=True, size=16)
    print(memory.name, flush=True)
    time.sleep(60)

def start(depth):
    multiprocessing.get_context("spawn").Process(target=worker, args=(depth,)).start()

if __name__ == "__main__":
    start(1)
    if sys.stdin.readline() == "kill\\n":
        kill_all_below()
        print("killed", flush=True)
    sys.stdin.readline()
"""


Family = tuple[subprocess.Popen[str], list[psutil.Process], list[Path]]
"""The first one, those below it, and shared memory of these."""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    (tmp_path / "family.py").write_text(CODE)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "family.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        memory = [Path("/dev/shm", process.stdout.readline().strip()) for _ in range(2)]
        assert all(path.is_file() for path in memory)
        below = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "resource_tracker" not in " ".join(child.cmdline())
        ]
        assert len(below) == 2
        yield process, below, memory
        process.kill()


def test_one_that_is_killed_takes_along_those_below_it(family: Family) -> None:
    process, below, _ = family
    process.kill()
    assert not psutil.wait_procs(below, timeout=5)[1]


def test_one_in_the_middle_takes_along_those_below_it(family: Family) -> None:
    _, (middle, last), _ = family
    middle.kill()
    assert not psutil.wait_procs([last], timeout=5)[1]


def test_all_below_are_killed_at_once_and_leave_no_memory(family: Family) -> None:
    process, below, memory = family
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("kill\n")
    process.stdin.flush()
    assert process.stdout.readline() == "killed\n"
    assert not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not any(path.exists() for path in memory)
    assert process.poll() is None
