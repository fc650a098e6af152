"""Gateways that share a sampler: a request of one gateway that kills the sampler condemns none of another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sampler_service.core import room as room_module
from sampler_service.core.room import Room
from tests.support.waiting import until
from tests.unit.gateway.several import Several
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, sample_body
from tests.unit.gateway.talking import TalkingSampler
from tinsmith.errors import EngineDead
from tinsmith.rpc.auth import ALONE
from tinsmith.v1 import sampler_pb2

GUILTY = [1] * 40


class Poisoned(TalkingSampler):
    """Its engine dies of each guilty prompt, and of each guilty text that it has to tokenize, with all that it has in
    work. It dies once another request is in work beside that, or after a second. It is there again at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_deaths = 0
        self.in_work: set[asyncio.Future[None]] = set()
        self.room = Room(lambda error: None)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        await self._run(request.text == "guilty", context)
        return await super().Tokenize(request, context)

    async def Sample(self, request: Any, context: Any) -> Any:
        await self._run(_is_guilty(request), context)
        return await super().Sample(request, context)

    async def StreamSample(self, request: Any, context: Any) -> Any:
        await self._run(_is_guilty(request.request), context)
        pieces: Any = super().StreamSample(request, context)
        async for piece in pieces:
            yield piece

    async def _run(self, is_guilty: bool, context: Any) -> None:
        """As SamplerServicer lets calls in."""
        if ALONE in tuple(context.invocation_metadata()):
            async with self.room.alone():
                await context.send_initial_metadata((ALONE,))
                await self._compute(is_guilty)
        else:
            async with self.room.beside_others():
                await self._compute(is_guilty)

    async def _compute(self, is_guilty: bool) -> None:
        death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.in_work.add(death)
        try:
            if not is_guilty:
                await asyncio.wait([death], timeout=2)
            else:
                for _ in range(100):
                    if len(self.in_work) > 1:
                        break
                    await asyncio.sleep(0.01)
                self.num_deaths += 1
                for one in self.in_work:
                    if not one.done():
                        one.set_exception(EngineDead("an illegal memory access"))
            if death.done():
                death.result()
        finally:
            self.in_work.discard(death)


def _is_guilty(request: sampler_pb2.SampleRequest) -> bool:
    return b"".join(chunk.encoded_text.tokens for chunk in request.prompt) == b"\1\0\0\0" * len(GUILTY)


@pytest.fixture
async def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Several]:
    for module in ("gateway.sampling.lives", room_module.__name__):
        monkeypatch.setattr(f"{module}.STEP_S", 0.1)
    backends = Stack(tmp_path)
    backends.sampler_backend.servicer = Poisoned()
    await backends.trainer_backend.start()
    await backends.sampler_backend.start()
    several = Several(backends, tmp_path, database_url="")
    await several.start()
    yield several
    await several.stop()
    await backends.trainer_backend.stop()
    await backends.sampler_backend.stop()


@pytest.mark.parametrize("what", ["sample", pytest.param("text", marks=pytest.mark.slow)])
async def test_a_request_that_is_alone_at_its_gateway_is_not_condemned_for_another_gateways(
    several: Several, what: str
) -> None:
    sampler: Any = several.backends.sampler_backend.servicer
    here, there = (Client(base_url=url, timeout=60, headers={"x-api-key": "tml-test"}) for url in several.urls)
    async with here, there:

        async def guilty() -> str:
            if what == "text":
                return (await here.post("/v1/completions", json={"model": BASE_MODEL, "prompt": "guilty"})).text
            sampler_id = await here.sampling_session(await here.session())
            chunks = [{"type": "encoded_text", "tokens": GUILTY}]
            receipt = await here.call("asample", sample_body(sampler_id, 1, prompt={"chunks": chunks}))
            return (await here.result(receipt))["error"]

        async def innocent() -> Any:
            body = {"model": BASE_MODEL, "prompt": [2] * 40, "max_tokens": 2}
            return await there.post("/v1/completions", json=body)

        running = asyncio.create_task(innocent())
        await until(lambda: sampler.in_work)
        error = await guilty()
        answer = await running
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"]
    assert "3 samplers ended while they computed this request, so it is not given to another" in error
    assert sampler.num_deaths == 3
