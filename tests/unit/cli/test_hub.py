"""Base models of the Hugging Face hub, where no hub answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tinsmith_cli.ports import free_ports

MODEL = "nobody/nothing"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a Python program whose cache of the hub is empty, and whose hub does not answer."""

    def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN")
        own = {name: value for name, value in os.environ.items() if name not in names}
        own |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}", **env}
        return subprocess.run([sys.executable, *argv], env=own, capture_output=True, text=True, timeout=120)

    return run


def cached(tmp_path: Path, *, files: Sequence[str]) -> None:
    """Puts the model into the cache."""
    folder = tmp_path / "hf" / "hub" / "models--nobody--nothing"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    snapshot = folder / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text('{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}')


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["doctor", MODEL, "--quick"], "MODEL"),
        (["up", "--base-model", MODEL, "--port", "0", "--state-dir", "{}/state"], "--base-model"),
    ],
    ids=["doctor", "up"],
)
def test_one_line_says_that_the_hub_does_not_answer(
    command: Sequence[str], flag: str, run: Run, tmp_path: Path
) -> None:
    argv = [word.replace("{}", str(tmp_path)) for word in command]
    done = run("-m", "tinsmith_cli", *argv)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tinsmith: {flag}: {MODEL}: http://127.0.0.1:")
    assert " does not answer (" in line
    assert f"the cache {tmp_path}/hf/hub does not hold the model; name a folder with its files" in line
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "state" / "logs").exists()


PROGRAM = f"""
import os
from huggingface_hub import is_offline_mode
from tinsmith_cli.hub import require
require({MODEL!r}, flag="MODEL", report=print)
print(os.environ.get("HF_HUB_OFFLINE"), is_offline_mode())
"""
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "files", [["model.safetensors"], [INDEX, "part-1.safetensors", "part-2.safetensors"]], ids=["whole", "parts"]
)
def test_the_cache_alone_is_used_while_the_hub_does_not_answer(files: Sequence[str], run: Run, tmp_path: Path) -> None:
    cached(tmp_path, files=["config.json", *files])
    report, offline = run("-c", PROGRAM).stdout.splitlines()
    assert report.startswith(f"{MODEL}: http://127.0.0.1:")
    assert report.endswith("; the files in the cache are taken, as with HF_HUB_OFFLINE=1")
    assert offline == "1 True"
    assert run("-c", PROGRAM, HF_HUB_OFFLINE="1").stdout.splitlines() == ["1 True"]  # as the user wants it


@pytest.mark.parametrize(
    "files", [[], ["config.json"], ["config.json", INDEX, "part-1.safetensors"]], ids=["nothing", "no weights", "part"]
)
def test_a_cache_without_the_whole_model_does_not_do(files: Sequence[str], run: Run, tmp_path: Path) -> None:
    cached(tmp_path, files=files)
    done = run("-c", PROGRAM, HF_HUB_OFFLINE="1")
    assert f"MODEL: {MODEL}: HF_HUB_OFFLINE is set, and the cache {tmp_path}/hf/hub does not hold" in done.stderr
