"""Processes that die, or stop, in the middle of work: a cluster of two samplers for each file, healed for each test."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.faults.cluster import Cluster
from tests.faults.moments import fresh_seed
from tests.faults.runs import Outcome, run_all
from tests.support.left_sockets import allow_left_sockets, close_left_sockets  # noqa: F401 - a fixture
from tests.support.stack import Stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_left_sockets(items, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test shows the ends of the services' logs."""
    report = yield
    for name in ("cluster", "stack"):
        services = item.funcargs.get(name) if isinstance(item, pytest.Function) else None
        if report.failed and isinstance(services, Cluster | Stack):
            report.sections.append(("services", services.report()))
    return report


@pytest.fixture(scope="session")
def model(toy: Path) -> Path:
    return toy


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that faulty_sampler.py watches, for test files that run it as their first sampler."""
    return tmp_path_factory.mktemp("orders") / "order"


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), model, num_samplers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def mode(request: pytest.FixtureRequest) -> str:
    """The trainer's mode in a test marked `in_mode`."""
    return request.param


@pytest.fixture(scope="module")
def exactly(mode: str) -> bool:
    """Whether a disturbed run ends with the bits of an undisturbed one."""
    return mode == "deterministic"


@pytest.fixture(scope="module")
def undisturbed(running: Cluster) -> list[Outcome]:
    running.heal()
    with tinker.ServiceClient(base_url=running.url, api_key="tml-test") as service:
        return run_all(service, running.checkpoints)


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """All of it serves."""
    running.heal()
    return running


@pytest.fixture
def service(cluster: Cluster) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=cluster.url, api_key="tml-test") as service:
        yield service


@pytest.fixture(autouse=True)
def repetition(request: pytest.FixtureRequest) -> int:
    """Number of this one of a test that is `repeated`."""
    return getattr(request, "param", 0)


@pytest.fixture
def rng() -> random.Random:
    """A generator for this repetition. The printed seed appears with a failure."""
    seed = fresh_seed()
    print(f"TINSMITH_FAULT_SEED={seed}")
    return random.Random(seed)
