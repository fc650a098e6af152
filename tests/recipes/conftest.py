"""One real stack for all recipes, with every model name that they ask for."""

from collections.abc import Iterator

import pytest

from tests.recipes.harness import FOLDERS, HUB, PYTHON
from tests.support.stack import Stack


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make test-recipes`"
    assert (HUB / "env.sh").exists(), f"{HUB} holds no offline hub: run `make test-recipes`"
    for folder in FOLDERS.values():
        assert (HUB / folder).exists(), f"{HUB} is of an earlier version, without {folder}: run `make test-recipes`"
    models = [f"{name}={HUB / folder}" for name, folder in FOLDERS.items()]
    with Stack(tmp_path_factory.mktemp("state"), base_models=models, threads=None) as stack:
        yield stack.base_url
