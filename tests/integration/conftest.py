"""Two small stacks for all tests of this folder, and clients for the first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import torch

from tests.support.examples import BASE_MODEL
from tests.support.left_sockets import allow_left_sockets, close_left_sockets  # noqa: F401 - a fixture
from tests.support.stack import Stack
from tests.support.wire import Wire
from tinsmith.modeling.adapter import AdapterConfig, chosen_targets, num_elements
from tinsmith.modeling.base_model import BaseModel

KEY = "tml-second"
"""The only key of the second stack."""
DEFAULT_MODEL = "tinsmith/small-qwen3"
"""Name of the model that `tinsmith up` serves by default. The second stack gives it to the toy model."""
LONG_POLL_S = 2.0
"""Short, so that waiting clients see try_again too; the default is 30."""


@pytest.fixture(scope="session")
def stack(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state_dir = tmp_path_factory.mktemp("stack")
    env = {"GATEWAY_LONG_POLL_S": str(LONG_POLL_S)}
    with Stack(state_dir, base_models=[f"{BASE_MODEL}={toy}"], env=env) as stack:
        yield stack


@pytest.fixture(scope="session")
def second_stack(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with the settings that the first one lacks.

    Its services want KEY, and choose their threads themselves. Its sampler has memory for the adapters of four versions
    of rank 8.
    """
    base = BaseModel.load(toy, device=torch.device("cpu"), dtype=torch.float32)
    config = AdapterConfig(8)
    env = {
        "GATEWAY_API_KEYS": json.dumps([{"key": KEY, "name": "tests"}]),
        "SAMPLER_ADAPTER_MEMORY_BYTES": str(4 * 4 * num_elements(config, chosen_targets(config, base.targets))),
    }
    models = [f"{name}={toy}" for name in (BASE_MODEL, DEFAULT_MODEL)]
    with Stack(tmp_path_factory.mktemp("second"), base_models=models, env=env, threads=None) as stack:
        yield stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_left_sockets(items, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test shows the ends of the services' logs."""
    report = yield
    values = item.funcargs.values() if isinstance(item, pytest.Function) else ()
    if report.failed:
        report.sections += [("services", value.report()) for value in values if isinstance(value, Stack)]
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
