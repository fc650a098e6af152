"""A request that may have killed another sampler has its prompt computed while nothing else is. Others lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import SecretStr

from sampler_service.config import SamplerConfig
from sampler_service.core import room as room_module
from sampler_service.core import trial as module
from sampler_service.core.engine import EngineSlot
from sampler_service.core.room import Room
from sampler_service.core.sequence import SequenceGroup
from sampler_service.service import make_server
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.torch_engine.runner import Batch, Runner
from tests.support.models import make_model
from tests.support.waiting import until
from tests.unit.sampler_service.conftest import Service
from tests.unit.sampler_service.serving import prompt, request, sample, serving, slow_down
from tinsmith.rpc.auth import ALONE, PROMPT_ALONE
from tinsmith.rpc.channel import connect
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import sampler_pb2_grpc

OTHERS = [request(prompt(20 + n, seed=n), num_samples=1 + n % 2, max_tokens=60, seed=n) for n in range(5)]
SUSPECTS = [
    request(prompt(100, seed=7), num_samples=3, max_tokens=20, seed=7, on_trial=True),
    request(prompt(9, seed=8), max_tokens=1, seed=8, on_trial=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[set[SequenceGroup]]:
    """The requests in each step that was computed."""
    noted: list[set[SequenceGroup]] = []
    run = Runner.run

    def noting(self: Any, batch: Batch) -> Any:
        noted.append({one.group for one in batch.running} | {piece.job.group for piece in batch.pieces})
        return run(self, batch)

    monkeypatch.setattr(Runner, "run", noting)
    return noted


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[TorchEngine]:
    async with serving(folder, prefill_tokens_per_step=32) as engine:
        yield engine


async def test_a_prompt_on_trial_has_its_steps_to_itself_and_changes_nobodys_tokens(
    engine: TorchEngine, steps: list[set[SequenceGroup]]
) -> None:
    alone = [await (await engine.submit(replace(one, on_trial=False))).result() for one in [*OTHERS, *SUSPECTS]]
    others = [await engine.submit(one, stream=True) for one in OTHERS]
    readers = [one.deltas() for one in others]
    await anext(readers[0])  # they run
    suspects = [await engine.submit(one, stream=True) for one in SUSPECTS]
    for n, suspect in enumerate(suspects):
        trial = suspect.trial
        assert trial is not None
        assert await trial.granted()
        num_before = len(steps)
        await asyncio.sleep(0.05)
        assert len(steps) == num_before, "nothing is computed until the caller knows"
        trial.begin()
        readers.append(suspect.deltas())
        await anext(readers[-1])
        await asyncio.sleep(0.05)
        mine = steps[num_before:]
        assert mine
        assert all(len(groups) == 1 for groups in mine)
        assert len(set.union(*mine)) == 1, "nothing else is computed until the caller has the first token"
        assert len(mine) <= -(-len(SUSPECTS[n].prompt) // 32), "no step computes tokens of its output"
        trial.end()
    results = [await one.result() for one in [*others, *suspects]]
    for result, expected in zip(results, alone, strict=True):
        assert [one.tokens for one in result.sequences] == [one.tokens for one in expected.sequences]
    assert engine.scheduler.idle


@pytest.mark.parametrize("phase", ["waits", "granted", "computed"])
async def test_a_suspect_that_leaves_holds_nobody_up(engine: TorchEngine, phase: str) -> None:
    others = [await engine.submit(one) for one in OTHERS]
    suspect = await engine.submit(SUSPECTS[0], stream=True)
    assert suspect.trial is not None
    if phase != "waits":
        assert await suspect.trial.granted()
    if phase == "computed":
        suspect.trial.begin()
        await asyncio.sleep(0.05)
    suspect.cancel()
    suspect.trial.end()
    for one in others:
        await asyncio.wait_for(one.result(), 60)
    await until(lambda: engine.scheduler.idle)


async def test_others_wait_for_a_limited_time_and_the_caller_hears_of_it(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the caller never says that it knows."""
    monkeypatch.setattr(module, "LIMIT_S", 0.05)
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    others = [await engine.submit(one) for one in OTHERS]
    suspect = await engine.submit(SUSPECTS[0], stream=True)
    reader = suspect.deltas()
    first = await asyncio.wait_for(anext(reader), 60)
    assert list(first.tokens) == []
    for one in others:
        await asyncio.wait_for(one.result(), 60)
    assert len((await asyncio.wait_for(suspect.result(), 60)).sequences) == 3


async def test_one_that_ends_before_its_trial_is_not_waited_for(engine: TorchEngine) -> None:
    suspect = await engine.submit(SUSPECTS[0], stream=True)
    assert suspect.trial is not None
    later = await engine.submit(SUSPECTS[1], stream=True)
    assert later.trial is not None
    later.cancel()
    assert not await asyncio.wait_for(later.trial.granted(), 60)
    suspect.trial.begin()
    suspect.trial.end()
    await asyncio.wait_for(suspect.result(), 60)


@pytest.mark.parametrize("what", ["read", "cancelled"])
async def test_a_call_that_is_read_meanwhile_may_be_the_cause(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "READ_S", 0.01)
    room = Room(lambda error: None)
    has_begun = asyncio.Event()

    async def read() -> None:
        async with room.beside_others():
            has_begun.set()
            await asyncio.Event().wait()

    reading = asyncio.create_task(read())
    await has_begun.wait()
    if what == "cancelled":
        reading.cancel()
        await asyncio.wait([reading])
    assert not await room.hold()
    room.reopen()
    reading.cancel()
    await asyncio.wait([reading])


async def test_no_call_is_read_until_the_trial_is_over() -> None:
    room = Room(lambda error: None)
    assert await room.hold()
    is_read = asyncio.Event()

    async def read() -> None:
        async with room.beside_others():
            is_read.set()

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    assert not is_read.is_set()
    room.reopen()
    await reading


@pytest.mark.parametrize("max_tokens", [1, 20])
async def test_a_sampler_confirms_a_trial_and_others_go_on_afterwards(
    service: Service, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    slow_down(service.engine, monkeypatch)
    tokens = prompt(8, vocab_size=200)
    long = asyncio.ensure_future(service.stub.Sample(sample(tokens, max_tokens=30)))
    await until(lambda: bool(service.engine.scheduler.planner.running))
    calls: list[Any] = [
        service.stub.StreamSample(
            pb.StreamSampleRequest(request=sample(tokens, max_tokens=max_tokens)), metadata=(PROMPT_ALONE,)
        )
        for _ in range(3)
    ]
    for call in calls:
        assert PROMPT_ALONE in tuple(await call.initial_metadata())
    for call in calls:
        assert [piece async for piece in call][-1].HasField("result")
    assert (await long).sequences
    unary = service.stub.Sample(sample(tokens, max_tokens=2), metadata=(PROMPT_ALONE,))
    assert (await unary).sequences, "it has no first piece, so it gets no trial"
    assert not {ALONE, PROMPT_ALONE} & set(await unary.initial_metadata() or ())


async def test_a_caller_with_an_ordinary_key_gets_its_sample_and_no_trial(text_model_folder: Path) -> None:
    """A gateway whose key is an ordinary one sends its requests on after a death of a sampler, too."""
    async with serving(text_model_folder) as engine:
        keys = [SecretStr("tml-one")]
        config = SamplerConfig(base_model=str(text_model_folder), listen="127.0.0.1:0", api_keys=keys)
        server = make_server(config, EngineSlot(engine), engine.metrics)
        await server.start()
        async with connect(f"127.0.0.1:{server.port}", api_key="tml-one") as channel:
            asked = pb.StreamSampleRequest(request=sample(prompt(8, vocab_size=200), max_tokens=2))
            call: Any = sampler_pb2_grpc.SamplerServiceStub(channel).StreamSample(asked, metadata=(PROMPT_ALONE,))
            assert [piece async for piece in call][-1].HasField("result")
            assert PROMPT_ALONE not in tuple(await call.initial_metadata() or ())
        await server.stop(0)
