"""What the SDK leaves behind."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def collect_left_sockets() -> Iterator[None]:
    """The SDK leaves sockets to the garbage collector: here, and not at the end of everything."""
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Until then it may come to them in any test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed (transport )?<:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
