import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.parameters import fast_ones
from tests.support.postgres import Postgres, postgres  # noqa: F401 - a fixture
from tests.support.stores import BUCKET, StoreLocation, gs, s3
from tests.unit.trainer_service.journals import Journals
from tests.unit.trainer_service.scheduling import Bench, FakeEngine, MakeBench
from trainer_service.durability.journal import Journal
from trainer_service.metrics import Metrics
from trainer_service.scheduling.scheduler import Scheduler
from trainer_service.storage.checkpoints import CheckpointStore


@pytest.fixture
async def make_bench(tmp_path: Path) -> AsyncIterator[MakeBench]:
    benches: list[Bench] = []

    async def make(*, token_budget: int = 100, **settings: int) -> Bench:
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        journal = Journal(tmp_path / "journal", max_bytes=1 << 20, result_retention_s=60, metrics=metrics)
        engine = FakeEngine(token_budget)
        options = {"max_queued_operations": 50, "max_models": 10, **settings}
        scheduler = Scheduler(engine, journal, metrics=metrics, **options)
        benches.append(Bench(engine, journal, scheduler, registry))
        return benches[-1]

    yield make
    for bench in benches:
        bench.engine.gate.set()
        await bench.scheduler.close(timeout_s=5)
        await asyncio.to_thread(bench.journal.close)


@pytest.fixture
async def bench(make_bench: MakeBench) -> Bench:
    return await make_bench()


@pytest.fixture(params=["sqlite", "postgres"])
def journals(request: pytest.FixtureRequest, tmp_path: Path) -> Journals:
    """One of each form."""
    return Journals(tmp_path, "") if request.param == "sqlite" else request.getfixturevalue("in_postgres")


@pytest.fixture
def in_postgres(postgres: Postgres, tmp_path: Path) -> Journals:  # noqa: F811
    """In a database of this test alone."""
    return Journals(tmp_path, postgres.new_database().replace("+asyncpg", ""))


@pytest.fixture(scope="session")
def s3_env() -> Iterator[dict[str, str]]:
    with s3() as env:
        yield env


@pytest.fixture
def objects(s3_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreLocation:
    """In a bucket, for this test alone."""
    for name, value in s3_env.items():
        monkeypatch.setenv(name, value)
    return StoreLocation.of(f"s3://{BUCKET}/{uuid.uuid4().hex}", tmp_path / "state")


@pytest.fixture(scope="session")
def gs_env() -> Iterator[dict[str, str]]:
    with gs() as env:
        yield env


@pytest.fixture(params=fast_ones(["local", "s3", "gs"], ["local"]))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreLocation:
    """One of each kind. test_object_storage.py has an s3 among the fast tests."""
    if request.param == "s3":
        return request.getfixturevalue("objects")
    if request.param == "gs":
        for name, value in request.getfixturevalue("gs_env").items():
            monkeypatch.setenv(name, value)
        return StoreLocation.of(f"gs://{BUCKET}/{uuid.uuid4().hex}", tmp_path / "state")
    return StoreLocation.of(str(tmp_path / "root"), tmp_path / "state")


@pytest.fixture
def store(place: StoreLocation) -> Iterator[CheckpointStore]:
    store = place.open()
    yield store
    store.close()
