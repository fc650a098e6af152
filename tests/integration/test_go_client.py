"""The Go client of examples/grpc/go, written from proto/ alone; the trainer is killed in the middle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.killed_trainer import check_that_a_killed_trainer_changes_nothing

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/grpc/go"
FILES = ("client.go", "go.mod", "buf.gen.yaml")
PACKAGE = "example.org/tinsmith/client"
DEBIAN = Path("/usr/share/gocode")
"""GOPATH of Debian's packages."""
NEEDED = {
    "google.golang.org/grpc": "golang-google-grpc-dev",
    "google.golang.org/protobuf/proto": "golang-google-protobuf-dev",
    # Version 1.3, which satisfies golang-google-grpc-dev too, cannot read what today's plugin makes.
    "github.com/golang/protobuf/proto/registry.go": "golang-github-golang-protobuf-1-5-dev",
}
"""Go packages that the client needs, each with the Debian package that has it."""
SINCE_DEBIAN = {
    '\t"google.golang.org/grpc/credentials/insecure"\n': "",
    "grpc.WithTransportCredentials(insecure.NewCredentials())": "grpc.WithInsecure()",
    "grpc.NewClient": "grpc.Dial",
}
"""Names that grpc-go got after Debian's version, with the older ones; both mean the same."""


def run(*command: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """The error output of a command; empty where it succeeds."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | dict(env or {}), capture_output=True, text=True, timeout=300, check=False
    )
    return done.stderr.strip()[-1000:] or f"status {done.returncode}" if done.returncode else ""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built with Debian's packages where they are installed, else with the modules of go.mod."""
    for tool in ("go", "protoc-gen-go", "protoc-gen-go-grpc"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here")
    gopath = tmp_path_factory.mktemp("go")
    source = gopath / "src" / PACKAGE
    source.mkdir(parents=True)
    for name in FILES:
        shutil.copy(EXAMPLE / name, source / name)
    buf = str(Path(sys.executable).with_name("buf"))
    if complaint := run(buf, "generate", str(ROOT / "proto"), cwd=source):
        pytest.skip(f"the plugins for Go make no code of proto/: {complaint}")
    missing = [package for name, package in NEEDED.items() if not (DEBIAN / "src" / name).exists()]
    if not missing:
        env = {"GO111MODULE": "off", "GOPATH": f"{gopath}:{DEBIAN}"}
        program = (source / "client.go").read_text()
        for name, older in SINCE_DEBIAN.items():
            assert name in program
            program = program.replace(name, older)
        (source / "client.go").write_text(program)
    else:
        env = {"GO111MODULE": "on"}
        if complaint := run("go", "mod", "tidy", cwd=source, env=env):
            pytest.skip(f"go cannot fetch the client's modules, and Debian's {missing} are not here: {complaint}")
    assert run("go", "build", "-o", "client", cwd=source, env=env) == ""
    return source / "client"


@pytest.mark.slow
def test_a_go_client_trains_saves_and_samples_and_a_killed_trainer_changes_nothing(
    client: Path, toy: Path, tmp_path: Path
) -> None:
    check_that_a_killed_trainer_changes_nothing([str(client)], base_model=toy, state_dir=tmp_path, cwd=client.parent)
