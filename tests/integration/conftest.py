"""One small stack for all tests of this folder, and clients for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.integration.examples import BASE_MODEL
from tests.integration.wire import Wire
from tests.left_sockets import allow_left_sockets, close_left_sockets  # noqa: F401 - a fixture
from tests.stack import Stack

LONG_POLL_S = 2.0
"""Short, so that waiting clients see try_again too; the default is 30."""


@pytest.fixture(scope="session")
def stack(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state_dir = tmp_path_factory.mktemp("stack")
    env = {"GATEWAY_LONG_POLL_S": str(LONG_POLL_S)}
    with Stack(state_dir, base_models=[f"{BASE_MODEL}={toy}"], env=env) as stack:
        yield stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_left_sockets(items, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test shows the ends of the services' logs."""
    report = yield
    stack = item.funcargs.get("stack") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(stack, Stack):
        report.sections.append(("services", stack.report()))
    return report


@pytest.fixture(scope="module")
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    """A session for each file: its end frees the file's models."""
    with tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service:
        yield service


@pytest.fixture(scope="session")
def wire(stack: Stack) -> Iterator[Wire]:
    with Wire(stack.base_url) as wire:
        yield wire
