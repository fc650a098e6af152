"""The SDK leaves its sockets to the garbage collector, which may come to them in any test of a folder."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_LEFT_SOCKET = r"Exception ignored in. <(socket\.socket|function _SelectorTransport\.__del__)"


@pytest.fixture(scope="module", autouse=True)
def collect_left_sockets() -> Iterator[None]:
    """For a conftest.py to import: they go with the file that has left them."""
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


def allow_left_sockets(items: Sequence[pytest.Item], folder: Path) -> None:
    """Until then they are no failures of the folder's tests."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed (transport )?<:ResourceWarning"))
            item.add_marker(
                pytest.mark.filterwarnings(f"ignore:{_LEFT_SOCKET}:pytest.PytestUnraisableExceptionWarning")
            )
