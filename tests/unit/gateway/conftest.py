from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.gateway.stack import Client, Stack


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    stack = Stack(tmp_path)
    await stack.trainer_backend.start()
    await stack.sampler_backend.start()
    await stack.start_gateway()
    yield stack
    await stack.stop_gateway()
    await stack.trainer_backend.stop()
    await stack.sampler_backend.stop()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as client:
        yield client
