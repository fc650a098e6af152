"""Machines from recorded answers of NVML, and models from their config.json.

No machine with these GPUs was at hand: the answers have the form of pynvml's, with memory sizes as vendors and users
have published them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tinsmith_cli.planning import machine
from tinsmith_cli.planning.families import of_config
from tinsmith_cli.planning.machine import Machine
from tinsmith_cli.planning.shape import Shape

FOLDER = Path(__file__).parent
MACHINES = (
    "1x-rtx-4090", "1x-h100", "2x-h100", "8x-h100", "8x-h200", "mixed", "mig", "in-use", "none",
)  # fmt: skip
MODELS = (
    "Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B", "gpt-oss-20b", "Qwen3-30B-A3B", "Qwen3-32B", "Llama-3.1-70B",
    "DeepSeek-V3", "Kimi-K2",
)  # fmt: skip


class RecordedNvml:
    """The functions of pynvml that the planner calls, with the answers in a file. An answer that names an error of
    NVML is raised."""

    def __init__(self, name: str) -> None:
        self.answers: dict[str, Any] = json.loads((FOLDER / "machines" / f"{name}.json").read_text())
        self.is_open = False

    def nvmlInit(self) -> None:
        _raise(self.answers.get("nvmlInit"))
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        assert self.is_open
        return len(self.answers["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.answers["devices"][index]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], index: int) -> dict[str, Any]:
        if str(index) not in handle["instances"]:
            raise pynvml.NVMLError_NotFound
        return handle["instances"][str(index)]

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(**handle["nvmlDeviceGetMemoryInfo"])

    def __getattr__(self, name: str) -> Any:
        def answer(handle: dict[str, Any]) -> Any:
            assert self.is_open
            _raise(handle[name])
            return handle[name]

        return answer


def _raise(answer: Any) -> None:
    if isinstance(answer, str) and answer.startswith("NVMLError"):
        raise getattr(pynvml, answer)


def machine_of(name: str, *, env: dict[str, str] | None = None) -> Machine:
    nvml = RecordedNvml(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "usable_cores", lambda: nvml.answers["cores"])
        patch.setattr(machine, "host_bytes", lambda: nvml.answers["host_bytes"])
        return machine.see(nvml, env or {})


def model_of(name: str) -> Shape:
    return of_config(json.loads((FOLDER / "models" / f"{name}.json").read_text()), name=name)
