"""A rank whose torchrun is killed while the rank still imports torch ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
SLOW_TORCH = "import pathlib, time; pathlib.Path(__file__).with_name('begun').write_text(''); time.sleep(600)"
LAUNCHER = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends it")
def test_a_rank_ends_with_torchrun_also_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SLOW_TORCH)
    rank = [sys.executable, "-m", "trainer_service", "--base-model", "none"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "RANK": "1", "WORLD_SIZE": "2"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *rank], stdin=pipe, stdout=pipe, text=True, env=env
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            wait_until((tmp_path / "torch" / "begun").exists, what="the rank imports torch")
            parent.kill()
            psutil.wait_procs([child], timeout=10)
            assert not child.is_running()
        finally:
            if child.is_running():
                child.kill()
