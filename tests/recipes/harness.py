"""Runs one recipe of tinker-cookbook as a user does: `python -m`, settings on the command line, no network."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TINSMITH_COOKBOOK_PYTHON", ROOT / ".venv-cookbook/bin/python"))
HUB = Path(os.environ.get("TINSMITH_OFFLINE_HUB", ROOT / ".cache/offline-hub"))
MODEL = "Qwen/Qwen3-8B"
"""A name that the recipes know; the weights are the hub's tiny model."""
FOLDERS = {
    MODEL: "base_model",
    "Qwen/Qwen3.5-9B": "qwen3_5_model",
    "Qwen/Qwen3.5-9B-Base": "qwen3_5_model",
    "Qwen/Qwen3.6-35B-A3B": "teacher_model",
}
"""Public name -> folder of the hub. All but MODEL are names that recipes have as defaults or in their code, with
weights of Qwen3.5 in its published form. Those of the teacher answer the prompts of prompt_distillation and rubric."""
SEEING = "Qwen/Qwen3-VL-8B-Instruct"
"""The name of the hub's Qwen3-VL."""


def environment(base_url: str) -> dict[str, str]:
    """Environment of a process of the cookbook, whose hub is offline."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))},
        "HF_HOME": str(HUB / "hf_home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "TINKER_API_KEY": "tml-recipes",
        "TINKER_BASE_URL": base_url,
    }


def run_module(name: str, settings: dict[str, object], *, base_url: str, output: Path) -> subprocess.Popen[bytes]:
    """Starts `python -m tinker_cookbook.recipes.NAME`; its output goes to a file."""
    with output.open("wb") as log:
        return subprocess.Popen(
            [PYTHON, "-m", f"tinker_cookbook.recipes.{name}", *(f"{key}={value}" for key, value in settings.items())],
            env=environment(base_url),
            cwd=HUB / "work",
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def check_end(process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for it. An abort is no failure by itself: Python can abort at its exit, after all work, when a background
    thread of the client is in C++ code then. So whoever calls this has to look at what the recipe has made."""
    assert process.wait() in (0, -signal.SIGABRT), log.read_text()[-5000:]


def check_log(log: Path) -> None:
    """No recipe may hide trouble in its log."""
    text = log.read_text()
    assert not re.search(r"Traceback|\bERROR\b|failed", text), text[-5000:]


@dataclass(frozen=True)
class Recipe:
    """One recipe and its settings, with the folder in which it keeps its metrics and checkpoints."""

    name: str
    settings: dict[str, object]
    log_path: Path
    base_url: str
    takes_base_url: bool = True
    """Whether the recipe has a setting for it; all read the environment."""

    def start(self, output: Path) -> subprocess.Popen[bytes]:
        settings = {**self.settings, "log_path": self.log_path}
        if self.takes_base_url:
            settings["base_url"] = self.base_url
        return run_module(self.name, settings, base_url=self.base_url, output=output)

    def run(self, output: Path) -> str:
        """To its end, which has to be a good one. Returns what it printed."""
        check_end(self.start(output), output)
        check_log(output)
        text = output.read_text()
        assert re.search(r"[Tt]raining completed", text), text[-5000:]
        assert self.checkpoints()[-1] == "final"
        return text

    def kill_after_checkpoint(self, name: str, output: Path) -> None:
        """Starts it, and kills it without warning once that checkpoint is saved."""
        process = self.start(output)
        try:
            while name not in self.checkpoints():
                assert process.poll() is None, output.read_text()
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        check_log(output)

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.log_path / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def checkpoints(self) -> list[str]:
        return [row["name"] for row in self.rows("checkpoints.jsonl")]

    def metric(self, name: str) -> list[float]:
        """One value for each step; a step that was done again after a crash counts with its later value."""
        values = {row["step"]: row[name] for row in self.rows("metrics.jsonl") if name in row}
        assert list(values) == list(range(len(values)))
        print(name, [round(value, 4) for value in values.values()])
        return list(values.values())
