"""The workflow and the settings of Dependabot fit their schemas; the workflow's jobs are all parts of .ci/run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"


@pytest.mark.parametrize(
    ("schema", "file"), [("github-workflows", "workflows/check.yml"), ("dependabot", "dependabot.yml")]
)
def test_a_file_fits_its_schema(schema: str, file: str) -> None:
    check = [Path(sys.executable).parent / "check-jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*check, GITHUB / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_jobs_run_every_part_once() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows/check.yml").read_text())
    parts = [part for job in workflow["jobs"]["part"]["strategy"]["matrix"]["part"] for part in job.split()]
    (every,) = re.findall(r"^all=\((.*)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert parts == every.split()


def test_an_unknown_part_is_refused_before_anything_is_removed() -> None:
    done = subprocess.run([ROOT / ".ci/run", "tests"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no part is called 'tests'; parts: test check audit slow recipes vllm" in done.stderr
