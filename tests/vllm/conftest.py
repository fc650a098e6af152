"""What the SDK leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.left_sockets import allow_left_sockets, collect_left_sockets  # noqa: F401 - a fixture


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_left_sockets(items, Path(__file__).parent)
