"""Ctrl-C while a command of `tinsmith` still imports what it needs, which takes a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTS = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize("module", ["pynvml", "grpc"])
def test_an_interrupted_import_ends_without_a_word(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(INTERRUPTS)
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith_cli", "keys", "list", "--state-dir", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
