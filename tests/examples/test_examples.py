"""The programs of examples/, which the guides show, run as a user runs them, against one stack of a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack import Stack
from tests.support.toys import toy_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"
LEARNS = {
    "sft": "held-out loss",
    "dpo": "held-out pairs in order",
    "rl_math": "mean reward",
    "multi_turn": "mean reward",
    "multi_tenant_sweep": "best held-out loss",
    "distillation": "KL per token",
}
"""Programs, and the number that their last line shows before and after training."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The model answers in whole sentences, nearly always. After 150 steps it answered so seldom on some machines that
    reinforcement learning found no reward."""
    folder = toy_model(pretrain_steps=300)
    state_dir = tmp_path_factory.mktemp("state")
    with Stack(state_dir, base_models=[f"tinsmith/small-qwen3={folder}"]) as stack:
        yield stack


def run(stack: Stack, name: str, *arguments: str) -> str:
    env = {**os.environ, "TINKER_BASE_URL": stack.base_url, "TINKER_API_KEY": "tml-anything"}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LEARNS)
def test_an_example_learns(stack: Stack, name: str) -> None:
    *_, last = run(stack, name).splitlines()
    found = re.fullmatch(r"(.*?)(?:, at .*)?: ([\d.]+) -> ([\d.]+)", last)
    assert found is not None, last
    assert found[1] == LEARNS[name]
    before, after = float(found[2]), float(found[3])
    falls = "loss" in last or "KL" in last
    assert after < before if falls else after > before, last


def test_openai_chat_answers(stack: Stack) -> None:
    said = run(stack, "openai_chat")
    assert "taken: tinsmith/small-qwen3\n" in said
    assert re.search(r"as JSON: \{'color': '(red|blue|green)'\}\n$", said)


@pytest.mark.parametrize("name", [*LEARNS, "openai_chat"])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 100
