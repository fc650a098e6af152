"""The Node client of examples/grpc/node, written from proto/ alone; the trainer is killed in the middle."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.examples import BASE_MODEL
from tests.stack import Stack

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/grpc/node"
CACHE = ROOT / ".cache/grpc-node"


@pytest.fixture(scope="module")
def client() -> Path:
    """Where the client and its modules lie, which npm fetches once."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node with npm here")
    CACHE.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "client.js"):
        shutil.copy(EXAMPLE / name, CACHE / name)
    if not (CACHE / "node_modules/@grpc/grpc-js").is_dir():
        install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(install, cwd=CACHE, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot fetch the client's modules: {done.stderr.strip()[-200:]}")
    return CACHE


def start(client: Path, stack: Stack, *, pause_ms: int) -> subprocess.Popen[str]:
    command = ["node", "client.js", stack.trainers[0], stack.samplers[0]]
    env = os.environ | {"TINSMITH_PROTO": str(ROOT / "proto"), "TINSMITH_PAUSE_MS": str(pause_ms)}
    return subprocess.Popen(command, cwd=client, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_node_client_trains_saves_and_samples_and_a_killed_trainer_changes_nothing(
    client: Path, toy: Path, tmp_path: Path
) -> None:
    with Stack(tmp_path, base_models=[f"{BASE_MODEL}={toy}"]) as stack:
        undisturbed, _ = start(client, stack, pause_ms=0).communicate(timeout=120)
        lines = []
        with start(client, stack, pause_ms=300) as running:
            assert running.stdout is not None
            for line in running.stdout:
                lines.append(line)
                if line.startswith("step 2"):
                    (trainer,) = (one for one in stack.processes() if "trainer_service" in one.cmdline())
                    trainer.kill()
        assert running.returncode == 0, "".join(lines)
    disturbed = "".join(lines)
    assert "once more" in disturbed
    results = [re.findall(r"^(?:step|sampled) .*$", text, re.MULTILINE) for text in (undisturbed, disturbed)]
    assert len(results[0]) == 7, undisturbed
    assert results[0] == results[1]
