"""constraints.txt fits pyproject.toml."""

from __future__ import annotations

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
    assert required(["all", "postgres", "s3", "gcs", "otel"]) - PINNED.keys() == set()
