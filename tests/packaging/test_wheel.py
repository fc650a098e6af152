"""The wheel: what is in it, and that it serves and trains where there is no checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.packaging.requirements import ROOT, required
from tests.support.stack import Stack

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
PACKAGES = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"])
TAG = "v7.8.9"


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python -m build` in a repository of its own, whose only commit has a tag.

    The checkout itself may have another tag or none, and a build there would leave its files in it.
    """
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    commit = ["-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "--quiet", "--no-verify", "--message=t"]
    for command in (["init", "--quiet"], ["add", "--all", "--force"], commit, ["tag", TAG]):
        subprocess.run(["git", *command], cwd=source, check=True)
    # An isolated build takes setuptools and setuptools-scm from the index. Where they are installed, it needs no index.
    isolation = ["--no-isolation"] if find_spec("setuptools_scm") else []
    done = subprocess.run(
        [sys.executable, "-m", "build", *isolation, "--outdir", str(out), str(source)],
        cwd=out,
        env=_without_checkout(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


def _without_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel and links to the distributions that `tinsmith[all]` needs, and no others.

    With links nothing is fetched from an index, and a requirement that pyproject.toml lacks is missing here, too.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in required(["all"]):
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        assert tops, name
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    return folder


def test_the_wheel_has_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    """Migrations, the page in the browser, types and stubs are files of the packages."""
    names = zipfile.ZipFile(wheel).namelist()
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    own = {name for name in names if not name.startswith(info)}
    assert {name.split("/")[0] for name in own} == PACKAGES
    assert own == {name for name in tracked() if name.split("/")[0] in PACKAGES}
    assert {f"{package}/py.typed" for package in PACKAGES} <= own
    assert {f"{info}/licenses/LICENSE", "gateway/dashboard/static/vendor/uplot/LICENSE"} <= set(names)


def test_the_version_is_that_of_the_tag(installed: Path, tmp_path: Path) -> None:
    command = [installed / "bin" / "tinsmith", "--version"]
    said = subprocess.run(command, cwd=tmp_path, env=_without_checkout(), capture_output=True, text=True, check=True)
    assert said.stdout == f"tinsmith {TAG.removeprefix('v')}\n"


def test_up_from_the_wheel_trains(installed: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's program, with the SDK of the tests' own environment, against the installed services."""
    monkeypatch.chdir(tmp_path)  # `python -m` looks for modules in the working directory first
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = str(installed / "bin" / "python")
    where = [python, "-c", "import tinsmith, gateway; print(tinsmith.__file__, gateway.__file__, sep='\\n')"]
    for line in subprocess.run(where, capture_output=True, text=True, check=True).stdout.splitlines():
        assert line.startswith(f"{installed}/")
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with Stack(tmp_path / "state", base_models=[f"tinsmith/small-qwen3={toy}"], python=python) as stack:
        env = {**os.environ, "TINKER_BASE_URL": stack.base_url, "TINKER_API_KEY": "tml-wheel"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
        assert len(losses) == 20
        assert losses[-1] < losses[0]
