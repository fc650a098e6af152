"""Processes that die, or stop, in the middle of work: a cluster of two samplers for each file, healed for each test."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.faults.cluster import Cluster
from tests.stack import make_base_model


@pytest.fixture(scope="module", autouse=True)
def collect_left_sockets() -> Iterator[None]:
    """The SDK leaves sockets to the garbage collector: here, and not in some other test."""
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Until then it may come to them in any test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed (transport )?<:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failed test shows the ends of the services' logs."""
    report = yield
    cluster = item.funcargs.get("cluster") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(cluster, Cluster):
        report.sections.append(("services", cluster.report()))
    return report


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model that has learnt a little, so that its distributions are not flat."""
    return make_base_model(tmp_path_factory.mktemp("toy") / "tiny", pretrain_steps=20)


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), model, num_samplers=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """All of it serves."""
    running.heal()
    return running


@pytest.fixture
def service(cluster: Cluster) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=cluster.url, api_key="tml-test") as service:
        yield service
