"""constraints.txt fits pyproject.toml."""

from __future__ import annotations

import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.packaging.requirements import ROOT, required

LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PINNED = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ELSEWHERE = {"vllm", "liger"}
"""Extras for GPUs, which `make setup` does not install."""
DIRECT = PROJECT["dependencies"] + [
    line
    for name, lines in PROJECT["optional-dependencies"].items()
    if name not in ELSEWHERE
    for line in lines
    if not line.startswith("tinsmith[")
]


def test_every_line_is_one_exact_public_release() -> None:
    assert len(PINNED) == len(LINES)
    assert "tinsmith" not in PINNED  # its version is another at the next commit
    for version in PINNED.values():
        assert Version(version).local is None, version


@pytest.mark.parametrize("line", DIRECT)
def test_a_requirement_is_pinned_within_its_bounds(line: str) -> None:
    requirement = Requirement(line)
    name = canonicalize_name(requirement.name)
    assert name in PINNED, "`make lock` has not run since the requirement was added"
    assert requirement.specifier.contains(PINNED[name])


def test_what_the_requirements_require_is_pinned_too() -> None:
    """`make setup` installs them without looking for more."""
    assert required(["dev"]) - PINNED.keys() == {"pip"}


def test_make_setup_says_what_it_does_before_each_step() -> None:
    make = ["make", "--dry-run", "--what-if", "constraints.txt", "setup"]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    steps = [n for n, line in enumerate(lines) if line.startswith('echo "[')]
    assert [lines[n][6:11] for n in steps] == [f"[{number}/4]" for number in range(1, 5)]
    installs = [n for n, line in enumerate(lines) if "pip install" in line]
    assert min(steps) < min(installs)
    assert lines[installs[1]].endswith("torch==2.13.0")  # first but for pip, so that any build of it will do
