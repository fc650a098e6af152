"""A virtual environment for each SDK version, beside one folder of what is large and the same for all: torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHARED = "shared"
"""The environment whose packages the others see: torch, transformers and numpy. `make conformance` makes it."""


def environment(root: Path, version: str) -> Path:
    """The Python of the environment with this SDK; made when it is not there."""
    folder = root / version
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        # Found after the environment's own packages, and by pip too, which then installs nothing twice.
        _packages(python).joinpath("shared.pth").write_text(f"{_packages(root / SHARED / 'bin' / 'python')}\n")
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"tinker=={version}")
        done.touch()
    return python


def _packages(python: Path) -> Path:
    """Where it keeps them."""
    return Path(_run(str(python.absolute()), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout
