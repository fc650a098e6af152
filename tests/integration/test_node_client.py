"""The Node client of examples/grpc/node, written from proto/ alone; the trainer is killed in the middle."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.killed_trainer import check_that_a_killed_trainer_changes_nothing

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


@pytest.mark.slow
def test_a_node_client_trains_saves_and_samples_and_a_killed_trainer_changes_nothing(
    client: Path, toy: Path, tmp_path: Path
) -> None:
    check_that_a_killed_trainer_changes_nothing(
        ["node", "client.js"],
        base_model=toy,
        state_dir=tmp_path,
        cwd=client,
        env={"TINSMITH_PROTO": str(ROOT / "proto")},
    )
