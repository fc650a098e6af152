"""The unmodified recipes of tinker-cookbook against a real `tinsmith up`, with no network: `make test-recipes`.

Each recipe is killed after a checkpoint and started again, as a user would after a crash: it has to go on from there.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TINSMITH_COOKBOOK_PYTHON", ROOT / ".venv-cookbook/bin/python"))
HUB = Path(os.environ.get("TINSMITH_OFFLINE_HUB", ROOT / ".cache/offline-hub"))
MODEL = "Qwen/Qwen3-8B"  # a name that the recipes know; the weights are the hub's tiny model
SAVE_EVERY = 5
KILL_AFTER = 10


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make test-recipes`"
    assert (HUB / "env.sh").exists(), f"{HUB} holds no offline hub: run `make test-recipes`"
    command = [sys.executable, "-m", "tinsmith.cli", "up", "--base-model", f"{MODEL}={HUB / 'base_model'}"]
    state_dir = tmp_path_factory.mktemp("state")
    process = subprocess.Popen(
        [*command, "--port", "0", "--state-dir", str(state_dir)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if "Tinsmith is ready at" in line), None)
        assert ready, f"the stack did not start; see {state_dir / 'logs'}"
        yield ready.split()[4]
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=30)
        print(output)
    assert process.returncode == 0, "a service died on the way"


@dataclass(frozen=True)
class Recipe:
    """One recipe and its settings, with the folder in which it keeps its metrics and checkpoints."""

    name: str
    settings: dict[str, object]
    log_path: Path

    def start(self, output: Path) -> subprocess.Popen[bytes]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))},
            "HF_HOME": str(HUB / "hf_home"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "TINKER_API_KEY": "tml-recipes",
        }
        settings = [f"{name}={value}" for name, value in {**self.settings, "log_path": self.log_path}.items()]
        with output.open("wb") as log:
            return subprocess.Popen(
                [PYTHON, "-m", f"tinker_cookbook.recipes.{self.name}", *settings],
                env=environment,
                cwd=HUB / "work",
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.log_path / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def checkpoints(self) -> list[str]:
        return [row["name"] for row in self.rows("checkpoints.jsonl")]

    def metric(self, name: str) -> list[float]:
        """One value for each step; a step that was done again after the crash counts with its later value."""
        values = {row["step"]: row[name] for row in self.rows("metrics.jsonl") if name in row}
        assert list(values) == list(range(len(values)))
        return list(values.values())


def run_with_a_crash(recipe: Recipe, tmp_path: Path) -> None:
    """Kills the recipe once the checkpoint of step KILL_AFTER is there, and runs it again to its end."""
    first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
    first = recipe.start(first_log)
    try:
        while f"{KILL_AFTER:06d}" not in recipe.checkpoints():
            assert first.poll() is None, first_log.read_text()
            time.sleep(0.1)
    finally:
        first.kill()
        first.wait()
    assert recipe.start(second_log).wait() == 0, second_log.read_text()[-5000:]
    output = second_log.read_text()
    assert f"Resuming from batch {KILL_AFTER}" in output
    assert "Training completed" in output
    for log in (first_log, second_log):
        assert not re.search(r"Traceback|\bERROR\b|failed", log.read_text()), log.read_text()[-5000:]
    saved = recipe.checkpoints()
    assert saved == sorted(saved)  # the second run saves the step that it resumes from once more
    assert saved[-1] == "final"


def test_sl_loop_lowers_the_loss_and_resumes(base_url: str, tmp_path: Path) -> None:
    settings = {
        "base_url": base_url,
        "model_name": MODEL,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "max_steps": 30,
        "save_every": SAVE_EVERY,
    }
    recipe = Recipe("sl_loop", settings, tmp_path / "run")
    run_with_a_crash(recipe, tmp_path)
    losses = recipe.metric("train_mean_nll")
    print("losses", [round(loss, 3) for loss in losses])
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    # The optimizer and the weights came back: the loss goes on where it was.
    assert losses[KILL_AFTER] < losses[0]


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "cispo"])
def test_rl_loop_raises_the_reward_and_resumes(loss_fn: str, base_url: str, tmp_path: Path) -> None:
    settings = {
        "base_url": base_url,
        "model_name": MODEL,
        "batch_size": 16,
        "group_size": 8,
        "learning_rate": 1e-3,
        "max_tokens": 32,
        "max_steps": 30,
        "save_every": SAVE_EVERY,
        "loss_fn": loss_fn,
    }
    recipe = Recipe("rl_loop", settings, tmp_path / "run")
    run_with_a_crash(recipe, tmp_path)
    rewards = recipe.metric("reward/total")
    print("rewards", [round(reward, 3) for reward in rewards])
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
