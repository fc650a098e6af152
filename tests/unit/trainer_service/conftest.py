import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.unit.trainer_service.scheduling import Bench, FakeEngine, MakeBench
from trainer_service.journal import Journal
from trainer_service.metrics import Metrics
from trainer_service.scheduler import Scheduler


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
