"""Fixtures of the engine's tests, and allowance for sockets that the SDK leaves open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from sampler_service.torch_engine.engine import TorchEngine
from tests.support.left_sockets import allow_left_sockets, close_left_sockets  # noqa: F401 - a fixture
from tests.unit.sampler_service.serving import serving
from tests.vllm.cases import publish_adapters
from tests.vllm.client import Service
from tests.vllm.service import VllmService
from tinsmith.modeling.adapter import Adapter
from tinsmith.rpc.channel import connect
from trainer_service.config import TrainerConfig
from trainer_service.metrics import Metrics
from trainer_service.weight_sync.sender import WeightSender


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_left_sockets(items, Path(__file__).parent)


@pytest.fixture(scope="session")
def model(toy: Path) -> Path:
    return toy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def torch_engine(model: Path) -> AsyncIterator[TorchEngine]:
    async with serving(model, max_kv_tokens=4096) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(server: VllmService) -> AsyncIterator[Service]:
    """A client of `server`, which each file starts with flags of its own."""
    config = TrainerConfig(base_model="tiny", samplers=[server.address], channel_timeout_s=60)
    sender = WeightSender(config, Metrics(CollectorRegistry()), trainer_id="t")
    async with connect(server.address) as channel:
        yield Service(channel, sender)
    await sender.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapters(service: Service, torch_engine: TorchEngine) -> dict[str, Adapter]:
    return await publish_adapters(service, torch_engine)
