"""The processes that a benchmark starts: a stack to measure, and the loop to compare it with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.trainer.shapes import HYBRID_SHAPES, MODEL_SHAPES, store_shape

TINSMITH = [sys.executable, "-m", "tinsmith_cli"]
_STOP_S = 20.0
_SERVICES = ("trainer_service", "sampler_service", "gateway")


@dataclass(frozen=True, slots=True)
class MeasuredService:
    """A service to measure. Fields that are unknown for a server elsewhere are empty."""

    url: str
    base_model: str
    model_folder: Path | None = None
    grpc_address: str = ""
    up: subprocess.Popen[str] | None = None
    """The process of `tinsmith up`, if it was started here."""
    start_s: float = 0.0
    """Seconds until it was ready."""

    def service_pids(self) -> dict[str, int]:
        """Process ids by module name."""
        if self.up is None:
            return {}
        children = psutil.Process(self.up.pid).children(recursive=True)
        return {name: child.pid for child in children for name in _SERVICES if name in child.cmdline()}


@contextmanager
def started(
    size: str,
    *,
    models: Path,
    trainer_threads: int | None = None,
    sampler_threads: int | None = None,
    more_flags: Sequence[str] = (),
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Iterator[MeasuredService]:
    """`tinsmith up` with a model of this size, free ports, and a state folder that goes away with it. Threads: the most
    that each service may use; None leaves them to `tinsmith up`."""
    name, folder = f"bench/{size}", model_folder(size, models)
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as state:
        flags = {
            "port": "0",
            "base-model": f"{name}={folder}",
            "state-dir": state,
            **({"trainer-threads": str(trainer_threads)} if trainer_threads else {}),
            **({"sampler-threads": str(sampler_threads)} if sampler_threads else {}),
        }
        parts = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
        command = [python, *TINSMITH[1:], "up", *parts, *more_flags]
        # Its own session: Ctrl-C reaches this process alone, which then stops it once.
        begin = time.perf_counter()
        up = subprocess.Popen(  # noqa: S603
            command,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            url, grpc_address = _wait_ready(up)
            yield MeasuredService(url, name, folder, grpc_address, up, time.perf_counter() - begin)
        finally:
            up.terminate()
            up.wait(_STOP_S)


def model_folder(size: str, models: Path) -> Path:
    """Folder of a model with random weights, which is made if it does not exist. `size`: as of make-base-model, or one
    of HYBRID_SHAPES and MODEL_SHAPES."""
    if size in HYBRID_SHAPES or size in MODEL_SHAPES:
        return store_shape(size, models)
    folder = models.expanduser() / size
    command = [*TINSMITH, "make-base-model", "--size", size, "--out", str(folder)]
    subprocess.run(command, check=True)  # noqa: S603
    return folder


def _wait_ready(up: subprocess.Popen[str]) -> tuple[str, str]:
    """The URL, and the address of the first trainer."""
    assert up.stdout is not None
    for line in up.stdout:
        print(line, end="", flush=True)
        if ready := re.match(r"Tinsmith is ready at (\S+) \(.*trainer: ([^;,\s]+)[;,]", line):
            return ready[1], ready[2]
    raise SystemExit("tinsmith up ended before it was ready")


class Loop:
    """A module of this package as a subprocess, which sleeps between requests: JSON lines in, JSON lines out."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        self._process = subprocess.Popen(  # noqa: S603
            [python, "-m", f"benchmarks.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid
        self._answer()  # it has loaded

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request to the script and returns its answer, which has `seconds`."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def seconds(self, **request: Any) -> float:
        """Time of the work in the subprocess, in seconds."""
        return self.ask(**request)["seconds"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._module} ended with exit status {self._process.wait()}; its error is above")
        return json.loads(line)


class Baseline(Loop):
    """hf_baseline.py."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        super().__init__("hf_baseline", str(folder), str(rank))


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process and its living children have used so far."""
    parent = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (parent, *parent.children(recursive=True)))


def peak_rss_mb(pid: int) -> float:
    """Most memory that the process ever held (Linux)."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) * 1024 / 1e6
