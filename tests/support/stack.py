"""The real stack, as a user starts it: `tinsmith up` as a process, on free ports, with a state folder of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

STOP_LIMIT_S = 20.0
"""Twice what `tinsmith up` promises, with long polls open: the machine may have other work."""

_READY = re.compile(
    r"(?:Tinsmith is ready at (\S+)|this machine is ready) "
    r"\(models: (.*?); trainer: (.*?); sampler: (.*?); metrics: .*?; logs: (.*)\)"
)
_METRICS = re.compile(r"metrics on (http://[\d.]+:\d+/metrics)")
_LOG_LINES_SHOWN = 40


def make_base_model(out: Path, *, size: str = "tiny", seed: int = 0, pretrain_steps: int = 0) -> Path:
    """A model and its tokenizer, made by the command line; does nothing when `out` already holds them."""
    command = ["make-base-model", "--size", size, "--seed", str(seed), "--out", str(out)]
    if pretrain_steps:
        command += ["--pretrain-steps", str(pretrain_steps)]
    subprocess.run([sys.executable, "-m", "tinsmith_cli", *command], check=True, capture_output=True, timeout=300)
    return out


class Stack:
    """`with Stack(state_dir, base_models=["name=folder"]) as stack:` runs it.

    Leaving the block stops it, unless that was done in the block, and checks that nothing is left.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        base_models: Sequence[str],
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        startup_timeout_s: float = 180.0,
        python: str = sys.executable,
        module: str = "tinsmith_cli",
        threads: int | None = 1,
        within: Sequence[str] = (),
        joins: bool = False,
    ) -> None:
        """`env` is added to the environment: GATEWAY_*, TRAINER_* and SAMPLER_* settings that `up` has no flag for.
        `python` runs it; the default is this one. `module` stands in for the command. `threads`: the most of each
        service, because other tests share the cores; None leaves them to `up`. `within`: a command that runs another
        one, in a network namespace. `joins`: it is a further machine, which has no `base_url`."""
        self.state_dir = state_dir
        if threads is not None:
            flags = ["--trainer-threads", str(threads), "--sampler-threads", str(threads), *flags]
        port = [] if joins else ["--port", "0"]
        self._argv = [*within, python, "-m", module, "up", *port, "--state-dir", str(state_dir), *flags]
        self._argv += [part for model in base_models for part in ("--base-model", model)]
        self._env = {**os.environ, **(env or {})}
        self._startup_timeout_s = startup_timeout_s
        self._lines: list[str] = []
        self._ready = threading.Event()
        self._stopped = False
        self._is_ready = False
        self.process: subprocess.Popen[str]
        self.base_url = ""
        self.models: list[str] = []
        self.trainers: list[str] = []
        """gRPC addresses, one for each base model folder."""
        self.samplers: list[str] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    @contextmanager
    def running(self) -> Iterator[Self]:
        """As `with` the stack itself, for one that is launched."""
        try:
            yield self
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.report())
        if not self._stopped:
            self.stop()

    @property
    def logs(self) -> Path:
        return self.state_dir / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.state_dir / "checkpoints"

    def start(self) -> None:
        """Returns once it is ready; raises RuntimeError with its output and logs when it does not become so."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        self.process = subprocess.Popen(
            self._argv, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        self._ready.wait(self._startup_timeout_s)
        if not self._is_ready:
            self.kill()
            raise RuntimeError(f"tinsmith up did not become ready:\n{self.report()}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                if match := _READY.match(line):
                    self.base_url, self._is_ready = match[1] or "", True
                    self.models, self.trainers, self.samplers = (match[group].split(", ") for group in (2, 3, 4))
                    self._ready.set()
        self._ready.set()  # it has ended: nobody should wait for it any longer

    def processes(self, *arguments: str) -> list[psutil.Process]:
        """The services' processes, and what they have started: those that run, with all these words in their command
        lines."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # also a ZombieProcess: killed, and not yet waited for by its parent
                if set(arguments) <= set(process.cmdline()):
                    found.append(process)
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal; raises AssertionError unless all has ended in time, with status 0 and no process left."""
        self._stopped = True
        if self.process.poll() is not None:
            self._reader.join()
            raise AssertionError(f"tinsmith up had ended before it was stopped:\n{self.report()}")
        children = self.processes()
        self.process.send_signal(number)
        try:
            status = self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not stopped {STOP_LIMIT_S:g} s after {number.name}:\n{self.report()}") from None
        self._reader.join()
        left = [process for process in children if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        assert not left, f"left after {number.name}: {left}\n{self.report()}"
        assert status == 0, f"exit status {status} after {number.name}:\n{self.report()}"

    def kill(self) -> None:
        """Ends all of it at once; when this process is killed the kernel kills its services too."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def report(self) -> str:
        """Its output, and the end of each service's log."""
        parts = ["-- tinsmith up", *self._lines]
        for log in sorted(self.logs.glob("*.log")):
            parts += [f"-- {log.name}", *log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]]
        return "\n".join(parts)

    def metrics_url(self, service: str) -> str:
        """Address of /metrics of "gateway", "trainer" or "sampler"."""
        if service == "gateway":
            return f"{self.base_url}/metrics"
        match = _METRICS.search((self.logs / f"{service}.log").read_text())
        assert match is not None, f"the log of the {service} names no address of metrics"
        return match[1]
