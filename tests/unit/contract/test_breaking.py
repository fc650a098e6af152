"""`make proto-breaking`: proto/ is compared with the newest release, whatever the clone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUF = Path(sys.executable).parent / "buf"
METRICS = "proto/tinsmith/v1/metrics.proto"


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def check(folder: Path) -> tuple[int, str]:
    command = ["proto/check_breaking.sh", str(BUF)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    shutil.copytree(ROOT / "proto", folder / "proto")
    shutil.copy(ROOT / "buf.yaml", folder)
    git(tmp_path, "init", "--quiet", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def retype(folder: Path) -> None:
    file = folder / METRICS
    text = file.read_text()
    assert "string exposition = 1" in text
    file.write_text(text.replace("string exposition = 1", "int64 exposition = 1"))


def test_without_a_release_nothing_is_compared_and_that_is_said(repository: Path) -> None:
    retype(repository)
    status, said = check(repository)
    assert status == 0
    assert "no git tag has a proto/" in said


def test_a_field_of_another_type_breaks_the_newest_release_that_has_a_proto(repository: Path) -> None:
    git(repository, "tag", "v1")
    git(repository, "rm", "--quiet", "-r", "--cached", "proto")
    git(repository, "commit", "--quiet", "--message", "without proto/")
    git(repository, "tag", "v2")
    assert check(repository) == (0, "proto/ breaks nothing that v1 has\n")
    retype(repository)
    status, said = check(repository)
    assert status != 0
    assert 'Field "1" with name "exposition" on message "GetMetricsResponse" changed' in said


@pytest.mark.parametrize(
    ("file", "gone", "said"),
    [
        ("metrics.proto", r"service MetricsService {.*?\n}\n", 'service "MetricsService" was deleted'),
        ("trainer.proto", r"  rpc GetModel\(.*?\n", 'RPC "GetModel" on service "TrainerService" was deleted'),
        (
            "trainer.proto",
            r"  bool forward_only = 6;",
            'field "6" with name "forward_only" on message "ForwardBackwardRequest" was deleted',
        ),
    ],
)
def test_a_service_method_or_field_that_is_deleted_breaks_the_newest_release(
    file: str, gone: str, said: str, repository: Path
) -> None:
    git(repository, "tag", "v1")
    path = repository / "proto/tinsmith/v1" / file
    kept = '  reserved 6;\n  reserved "forward_only";' if "= 6" in gone else ""
    text, count = re.subn(gone, kept, path.read_text(), flags=re.DOTALL)
    assert count == 1
    path.write_text(text)
    status, output = check(repository)
    assert status != 0
    assert said in output


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  optional double eps = 4;", "  double eps = 4;"),
        ("  int64 reserved_bytes = 23;", "  uint64 reserved_bytes = 23;"),
    ],
)
def test_a_field_whose_values_get_another_meaning_breaks_the_newest_release(
    before: str, after: str, repository: Path
) -> None:
    git(repository, "tag", "v1")
    path = repository / "proto/tinsmith/v1/trainer.proto"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    status, output = check(repository)
    assert status != 0
    assert "changed" in output


def test_a_shallow_clone_fetches_the_tags_and_one_without_an_origin_says_so(repository: Path, tmp_path: Path) -> None:
    git(repository, "tag", "v1")
    retype(repository)
    git(repository, "commit", "--quiet", "--all", "--message", "second")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth", "1", "--no-tags", f"file://{repository}", str(clone))
    status, said = check(clone)
    assert (status != 0, "exposition" in said) == (True, True), said
    lonely = tmp_path / "lonely"
    git(tmp_path, "clone", "--quiet", "--depth", "1", "--no-tags", f"file://{repository}", str(lonely))
    git(lonely, "remote", "remove", "origin")
    status, said = check(lonely)
    assert status == 0
    assert "its tags cannot be fetched from origin" in said
