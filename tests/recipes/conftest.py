"""One real stack for all recipes, with every model name that they ask for."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.recipes.harness import ANSWERER, HUB, MODEL, PYTHON, TEACHER


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make test-recipes`"
    assert (HUB / "env.sh").exists(), f"{HUB} holds no offline hub: run `make test-recipes`"
    state_dir = tmp_path_factory.mktemp("state")
    command = [sys.executable, "-m", "tinsmith_cli", "up", "--port", "0", "--state-dir", str(state_dir)]
    for name, folder in {MODEL: "base_model", ANSWERER: "base_model", TEACHER: "teacher_model"}.items():
        command += ["--base-model", f"{name}={HUB / folder}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if "Tinsmith is ready at" in line), None)
        assert ready, f"the stack did not start; see {state_dir / 'logs'}"
        yield ready.split()[4]
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=30)
        print(output)
    assert process.returncode == 0, "a service died on the way"
