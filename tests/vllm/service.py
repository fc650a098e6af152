"""A sampler service on vLLM, in the environment that `make test-vllm` makes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
MODEL = "base"

_PORT = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
_SERVING = re.compile(r"serving .* on port")


def flags(settings: Mapping[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


class VllmService:
    """`with VllmService(model_folder) as service:` runs it."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._argv = [
            str(PYTHON), "-m", "sampler_service", "--engine", "vllm", "--device", "cpu", "--num-threads", "1",
            "--listen", "127.0.0.1:0", "--base-model", str(model), "--model-names", f'["{MODEL}"]', *flags,
        ]  # fmt: skip
        self.lines: list[str] = []
        self.port = 0
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        assert PYTHON.exists(), "make test-vllm makes it"
        self.process = subprocess.Popen(
            self._argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        in_time = self._ready.wait(480)  # vLLM loads for four minutes on a machine with much else to do
        if not (in_time and any(_SERVING.search(line) for line in self.lines)):
            self._kill()
            raise RuntimeError(f"the sampler did not start:\n{self.report()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))
                if match := _PORT.search(line):
                    self.port = int(match[1])
                if _SERVING.search(line):
                    self._ready.set()
        self._ready.set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def engines(self) -> list[psutil.Process]:
        """vLLM's own processes: its engine, and with several workers those."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    def stop(self) -> int:
        """Exit status of an orderly stop; nothing may be left."""
        engines = self.engines()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(20)
        _, alive = psutil.wait_procs(engines, timeout=5)
        assert not alive, self.report()
        return status

    def _kill(self) -> None:
        if self.process.poll() is None:
            engines = self.engines()
            self.process.kill()
            self.process.wait()
            for engine in engines:
                if engine.is_running():
                    engine.kill()
        self._reader.join()

    def report(self) -> str:
        return "\n".join(self.lines[-80:])
