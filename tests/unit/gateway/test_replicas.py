"""Several samplers of one base model: who gets a request, and what becomes of it when its sampler is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gateway.sampling import replicas
from tests.support.parameters import fast_ones
from tests.support.waiting import until
from tests.unit.gateway.stack import BASE_MODEL, Backend, Client, FakeSampler, Stack, sample_body
from tests.unit.gateway.talking import TalkingSampler
from tests.unit.gateway.test_inflight import save
from tests.unit.gateway.test_sampling import sampler_of_a_save
from tinsmith.errors import EngineDead, NotReady, OutOfCapacity, VersionNotLoaded
from tinsmith.rpc.addresses import Addresses, write_addresses
from tinsmith.tasks import Pause
from tinsmith.v1 import sampler_pb2


class Proxy:
    """Carries bytes to a service, unless it is frozen: then its connections stay open, and nothing comes through, as
    with a process after SIGSTOP."""

    def __init__(self) -> None:
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.port = 0
        self._upstream = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, upstream: int) -> None:
        self._upstream = upstream
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            writers.append(upstream_writer)
            carrying = [self._carry(reader, upstream_writer), self._carry(upstream_reader, writer)]
            both = [asyncio.ensure_future(each) for each in carrying]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in both:
                    each.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for each in writers:
                each.close()
            for each in writers:
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self.thawed.wait()
            sink.write(data)
            await sink.drain()

    async def stop(self) -> None:
        self._server.close()
        await asyncio.sleep(0.01)  # what was accepted last has begun then
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Pair:
    """A gateway in front of two samplers, each behind a proxy."""

    def __init__(self, stack: Stack, samplers: list[Any]) -> None:
        self.stack = stack
        self.samplers = samplers
        self.backends = [Backend(sampler, "sampler") for sampler in samplers]
        self.proxies = [Proxy() for _ in samplers]

    async def start(self) -> None:
        for backend, proxy in zip(self.backends, self.proxies, strict=True):
            await backend.start()
            await proxy.start(backend.port)
        self.stack.trainer.samplers[:] = self.samplers
        self.stack.sampler_ports = [proxy.port for proxy in self.proxies]
        await self.stack.trainer_backend.start()
        self.stack.sampler_backend.server = self.backends[0].server  # so that the start waits for a sampler
        await self.stack.start_gateway(sampler_timeout_s=0.3, long_poll_s=1.0)
        await until(lambda: len(self.replicas.usable(BASE_MODEL)) == 2)

    async def stop(self) -> None:
        await self.stack.stop_gateway()
        await self.stack.trainer_backend.stop()
        for backend, proxy in zip(self.backends, self.proxies, strict=True):
            await proxy.stop()
            await backend.stop()
        gc.collect()  # gRPC leaves calls of a channel that never connected, and ends them on this loop
        await asyncio.sleep(0.01)

    @property
    def replicas(self) -> Any:
        assert self.stack.server is not None
        return self.stack.server.app.state.gateway.clients.samplers

    def asked(self) -> list[int]:
        return [len(sampler.requests) for sampler in self.samplers]

    async def metric(self, client: Client, name: str, n: int, **labels: str) -> float:
        wanted = {"sampler": f"127.0.0.1:{self.proxies[n].port}"} | labels
        for line in (await client.get("/metrics")).text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.startswith(f"{name}{{") and all(f'{key}="{label}"' in head for key, label in wanted.items()):
                return float(value)
        raise AssertionError(f"no {name} of {wanted}")


@pytest.fixture
async def pair(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Pair]:
    pair = Pair(Stack(tmp_path), [FakeSampler(), FakeSampler()])
    await pair.start()
    yield pair
    await pair.stop()
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"] == []


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[Client]:
    async with Client(base_url=pair.stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as client:
        yield client


def body(sampler_id: str, seq_id: int, tokens: list[int], **fields: Any) -> dict[str, Any]:
    return sample_body(sampler_id, seq_id, prompt={"chunks": [{"type": "encoded_text", "tokens": tokens}]}, **fields)


async def answered(client: Client, receipt: Any) -> sampler_pb2.SampleResponse:
    while "protobuf" not in (reply := await client.poll(receipt["request_id"])).headers["content-type"]:
        assert reply.json()["type"] == "try_again", reply.text
    response = sampler_pb2.SampleResponse.FromString(reply.content)
    assert len(response.sequences) == 2
    return response


async def test_prompts_spread_and_a_prompt_stays(pair: Pair, client: Client) -> None:
    sampler_id = await client.sampling_session(await client.session())
    for sampler in pair.samplers:
        sampler.go.clear()
    receipts = [await client.call("asample", body(sampler_id, n, [n] * 40)) for n in range(32)]
    await until(lambda: sum(pair.asked()) == 32)
    assert max(pair.asked()) <= 1.25 * 16 + 1
    assert await pair.metric(client, "gateway_sampler_sequences", 0) == 2 * pair.asked()[0]
    for sampler in pair.samplers:
        sampler.go.set()
    for receipt in receipts:
        await answered(client, receipt)
    before = pair.asked()
    turns = [7] * 400
    for n, length in enumerate((40, 80, 200, 400)):  # a conversation
        await answered(client, await client.call("asample", body(sampler_id, 100 + n, turns[:length])))
    assert sorted(now - then for now, then in zip(pair.asked(), before, strict=True)) == [0, 4]
    assert await pair.metric(client, "gateway_sampler_requests_total", 0) == pair.asked()[0]


@pytest.mark.parametrize("how", ["killed", "silent", "not serving"])
async def test_requests_of_a_lost_sampler_are_sent_again_and_answered_once(
    pair: Pair, client: Client, how: str
) -> None:
    sampler_id = await client.sampling_session(await client.session())
    pair.samplers[0].go.clear()
    receipts = [await client.call("asample", body(sampler_id, n, [n] * 40)) for n in range(8)]
    await until(lambda: sum(pair.asked()) == 8)
    held = pair.asked()[0]
    assert held
    if how == "killed":
        await pair.backends[0].stop()
    elif how == "silent":
        pair.proxies[0].thawed.clear()
    else:
        assert pair.backends[0].server is not None
        await pair.backends[0].server.set_serving(False)
    for receipt in receipts:
        await answered(client, receipt)
    assert pair.asked() == [held, 8]
    assert await pair.metric(client, "gateway_resubmissions_total", 0) == held
    assert await pair.metric(client, "gateway_sampler_sequences", 0) == 0
    assert len(pair.replicas.usable(BASE_MODEL)) == 1
    # It comes back, and its answers come late.
    pair.samplers[0].go.set()
    if how == "killed":
        await pair.backends[0].start()
    elif how == "silent":
        pair.proxies[0].thawed.set()
    else:
        assert pair.backends[0].server is not None
        await pair.backends[0].server.set_serving(True)
    await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 2)
    assert await pair.metric(client, "gateway_sampler_state", 0, gateway_sampler_state="serving") == 1
    for n in range(20, 30):
        await answered(client, await client.call("asample", body(sampler_id, n, [n] * 40)))
    assert pair.asked()[0] > held


async def test_services_come_and_go_by_the_file_while_the_gateway_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.rpc.addresses._FILE_INTERVAL_S", 0.02)
    pair = Pair(Stack(tmp_path), [FakeSampler(), FakeSampler()])
    listed = tmp_path / "services.json"
    write_addresses(listed, Addresses())
    pair.stack.settings["services_file"] = listed
    pair.stack.sampler_backend.server = None  # the start waits for no service
    await pair.stack.start_gateway(sampler_timeout_s=0.3, long_poll_s=1.0)
    samplers = []
    try:
        await pair.stack.trainer_backend.start()
        for backend, proxy in zip(pair.backends, pair.proxies, strict=True):
            await backend.start()
            await proxy.start(backend.port)
            samplers.append(f"127.0.0.1:{proxy.port}")
        trainers = [f"127.0.0.1:{pair.stack.trainer_backend.port}"]
        async with Client(base_url=pair.stack.url, timeout=20, headers={"x-api-key": "tml-test"}) as client:
            waiting = (await client.get("/api/v1/healthz")).json()
            assert waiting["waiting_for"] == [
                "a trainer, which has not joined yet",
                "a sampler, which has not joined yet",
            ]
            session = asyncio.create_task(client.session())
            write_addresses(listed, Addresses(trainers, samplers[:1]))
            sampler_id = await client.sampling_session(await session)
            await answered(client, await client.call("asample", body(sampler_id, 0, [0] * 40)))
            assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}

            write_addresses(listed, Addresses(trainers, samplers))  # another one comes
            await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 2)
            for sampler in pair.samplers:
                sampler.go.clear()
            receipts = [await client.call("asample", body(sampler_id, n, [n] * 40)) for n in range(1, 9)]
            await until(lambda: sum(pair.asked()) == 9)
            held = pair.asked()[1]
            assert held
            assert await pair.metric(client, "gateway_sampler_sequences", 1) == 2 * held

            write_addresses(listed, Addresses(trainers, samplers[:1]))  # and goes, with work
            await until(lambda: len(pair.replicas.all) == 1)
            pair.samplers[0].go.set()
            for receipt in receipts:
                await answered(client, receipt)
            with pytest.raises(AssertionError, match="no gateway_sampler_state"):
                await pair.metric(client, "gateway_sampler_state", 1)
            pair.samplers[1].go.set()

            write_addresses(listed, Addresses(trainers, samplers[::-1]))  # it is there again
            await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 2)

            write_addresses(listed, Addresses((), samplers))  # no trainer: requests wait for one
            await until(lambda: not pair.stack.gateway.clients.trainers)
            model = asyncio.create_task(client.model(await client.session()))
            write_addresses(listed, Addresses(trainers, samplers))
            await model
    finally:
        await pair.stop()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_silent_sampler_keeps_its_work_where_no_other_is(pair: Pair, client: Client) -> None:
    await pair.backends[1].stop()
    sampler_id = await client.sampling_session(await client.session())
    pair.samplers[0].go.clear()
    receipt = await client.call("asample", body(sampler_id, 0, [1] * 40))
    await until(lambda: pair.asked()[0] == 1)
    pair.proxies[0].thawed.clear()
    await until(lambda: not pair.replicas.usable(BASE_MODEL))
    waiting = (await client.poll(receipt["request_id"])).json()
    assert (waiting["queue_state"], waiting["queue_state_reason"]) == ("paused_capacity", "the sampler does not answer")
    pair.samplers[0].go.set()
    pair.proxies[0].thawed.set()
    await answered(client, receipt)
    assert pair.asked() == [1, 0]


async def test_work_of_a_silent_sampler_goes_to_one_that_comes_later(pair: Pair, client: Client) -> None:
    await pair.backends[1].stop()
    sampler_id = await client.sampling_session(await client.session())
    pair.samplers[0].go.clear()
    receipt = await client.call("asample", body(sampler_id, 0, [1] * 40))
    await until(lambda: pair.asked()[0] == 1)
    pair.proxies[0].thawed.clear()
    await until(lambda: not pair.replicas.usable(BASE_MODEL))
    await pair.backends[1].start()
    await answered(client, receipt)
    assert pair.asked() == [1, 1]


async def test_a_full_sampler_leaves_its_requests_to_the_other(pair: Pair, client: Client) -> None:
    async def full(request: Any, context: Any) -> Any:
        raise OutOfCapacity("the queue is full")

    pair.samplers[0].Sample = full
    pair.backends[0].servicer = pair.samplers[0]
    await pair.backends[0].stop()
    await pair.backends[0].start()
    await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 2)
    sampler_id = await client.sampling_session(await client.session())
    receipts = [await client.call("asample", body(sampler_id, n, [n] * 40)) for n in range(8)]
    for receipt in receipts:
        await answered(client, receipt)
    assert pair.asked() == [0, 8]


async def lacking_at(pair: Pair, client: Client, n: int) -> str:
    """A sampling session whose version one of the two does not hold, and cannot get now."""

    async def refuse(request: Any, context: Any) -> Any:
        raise NotReady("the samplers cannot take it now")

    pair.stack.trainer.PublishCheckpoint = refuse  # type: ignore[method-assign]
    await pair.stack.trainer_backend.stop()
    await pair.stack.trainer_backend.start()
    sampler_id, _ = await sampler_of_a_save(client, await client.session())
    pair.samplers[n].versions = {""}
    await pair.replicas.list_versions(BASE_MODEL)
    return sampler_id


async def test_a_full_holder_is_asked_again_after_pauses_and_one_that_lacks_the_version_is_not(
    pair: Pair, client: Client
) -> None:
    sampler_id = await lacking_at(pair, client, 1)
    pair.samplers[0].refusals = [OutOfCapacity("the queue is full")] * 3
    await answered(client, await client.call("asample", body(sampler_id, 0, [1] * 40)))
    assert pair.asked() == [4, 0]


async def test_a_version_that_is_said_to_be_there_and_is_not_is_asked_for_with_pauses(
    pair: Pair, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    async def wait(pause: Pause) -> None:
        pauses.append(pause.next_s)

    monkeypatch.setattr(Pause, "wait", wait)
    sampler_id, _ = await sampler_of_a_save(client, await client.session())
    for sampler in pair.samplers:
        sampler.refusals = [VersionNotLoaded("it has just been evicted")] * 2
    await answered(client, await client.call("asample", body(sampler_id, 0, [1] * 40)))
    tries = sum(pair.asked())
    assert len(pauses) >= tries - 2  # the first is at once


@pytest.mark.parametrize("num_samplers", [1, 2])
async def test_requests_of_a_dead_engine_are_sent_again(pair: Pair, client: Client, num_samplers: int) -> None:
    if num_samplers == 1:
        await pair.backends[1].stop()
        await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 1)
    sampler_id = await client.sampling_session(await client.session())
    asked = await first_choice(pair, client, sampler_id)
    asked.refusals = [EngineDead("the engine has died")]
    await answered(client, await client.call("asample", body(sampler_id, 1, [1] * 40)))
    assert not asked.refusals
    resubmitted = [await pair.metric(client, "gateway_resubmissions_total", n) for n in range(num_samplers)]
    assert sum(resubmitted) == 1


async def first_choice(pair: Pair, client: Client, sampler_id: str) -> FakeSampler:
    """The sampler that gets the prompt of 40 ones while nothing else runs."""
    before = pair.asked()
    await answered(client, await client.call("asample", body(sampler_id, 0, [1] * 40)))
    (n,) = [n for n, (now, then) in enumerate(zip(pair.asked(), before, strict=True)) if now > then]
    return pair.samplers[n]


class Poisoned(TalkingSampler):
    """Its engine dies of every prompt of 40 ones, with all that it has in work. It is there again at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_deaths = 0
        self.in_work: set[asyncio.Future[None]] = set()

    async def Sample(self, request: Any, context: Any) -> Any:
        await self._compute(request)
        return await super().Sample(request, context)

    async def StreamSample(self, request: Any, context: Any) -> Any:
        await self._compute(request.request)
        pieces: Any = super().StreamSample(request, context)
        async for piece in pieces:
            yield piece

    async def _compute(self, request: sampler_pb2.SampleRequest) -> None:
        tokens = b"".join(chunk.encoded_text.tokens for chunk in request.prompt)
        death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.in_work.add(death)
        try:
            async with asyncio.timeout(0.1):
                if tokens == b"\1\0\0\0" * 40:
                    self.num_deaths += 1
                    for one in self.in_work:
                        if not one.done():  # its time may have ended in this pass of the event loop
                            one.set_exception(EngineDead("an illegal memory access"))
                    self.in_work.clear()
                await death
        except TimeoutError:
            pass
        finally:
            self.in_work.discard(death)


@pytest.fixture
async def poisoned(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(Stack(tmp_path), [Poisoned(), Poisoned()])
    await pair.start()
    yield pair
    await pair.stop()


@pytest.mark.parametrize("num_samplers", [1, 2])
async def test_a_request_that_kills_samplers_with_its_prompt_fails_alone(poisoned: Pair, num_samplers: int) -> None:
    if num_samplers == 1:
        await poisoned.backends[1].stop()
        await until(lambda: len(poisoned.replicas.usable(BASE_MODEL)) == 1)
    async with Client(base_url=poisoned.stack.url, timeout=60) as client:
        sampler_id = await client.sampling_session(await client.session())
        calls = [client.call("asample", body(sampler_id, n, [2 + n] * 40)) for n in range(8)]
        calls.insert(4, client.call("asample", body(sampler_id, 8, [1] * 40)))
        ids = await asyncio.gather(*calls)
        failure = await client.result(ids.pop(4))
        for request_id in ids:
            await answered(client, request_id)
    assert "samplers ended while they computed this request, so it is not given to" in failure["error"]
    assert "an illegal memory access" in failure["error"]
    assert failure["category"] == "server"
    # It has company at its first two deaths at most, and is alone at the third.
    assert 2 <= sum(sampler.num_deaths for sampler in poisoned.samplers) <= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_nor_is_one_of_the_openai_api(poisoned: Pair, stream: bool) -> None:
    async with Client(base_url=poisoned.stack.url, timeout=60) as client:
        bodies = [{"model": BASE_MODEL, "prompt": [1 + n] * 40, "max_tokens": 2, "stream": stream} for n in range(8)]
        guilty, *others = await asyncio.gather(*(client.post("/v1/completions", json=each) for each in bodies))
    assert "samplers ended while they computed this request" in guilty.text
    assert all(reply.status_code == 200 and "error" not in reply.json() for reply in others if not stream)
    assert all("error" not in reply.text for reply in others)
    assert 2 <= sum(sampler.num_deaths for sampler in poisoned.samplers) <= 3


class Late(TalkingSampler):
    """Its engine dies 0.2 s after the first token of a prompt of 40 times 200 or above, with all that it has in work.
    Other prompts have their first token after 0.3 s, and their last one 0.3 s later. It is there again 0.1 s after a
    death: a call that was on its way to a process that has died never reaches the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Counter[int] = Counter()
        """How often each guilty prompt came."""
        self.num_deaths = 0
        self.in_work: set[asyncio.Future[None]] = set()
        self.is_back_at = 0.0

    async def Sample(self, request: Any, context: Any) -> Any:
        async with aclosing(self._compute(request)) as steps:
            async for _ in steps:
                pass
        return await super().Sample(request, context)

    async def StreamSample(self, request: Any, context: Any) -> Any:
        pieces: Any = super().StreamSample(request, context)
        async with aclosing(self._compute(request.request)) as steps:
            async for _ in steps:
                yield await anext(pieces)
            async for piece in pieces:
                yield piece

    async def _compute(self, request: sampler_pb2.SampleRequest) -> AsyncGenerator[None, None]:
        """Yields at the first token."""
        if time.monotonic() < self.is_back_at:
            raise EngineDead("gone", computing="no")
        mark = request.prompt[0].encoded_text.tokens[0]
        death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.in_work.add(death)
        try:
            if mark < 200:
                await self._live(death, 0.3)
                yield
                await self._live(death, 0.3)
                return
            self.given[mark] += 1
            yield
            await self._live(death, 0.2)
            self.num_deaths += 1
            self.is_back_at = time.monotonic() + 0.1
            for one in self.in_work:
                if not one.done():
                    one.set_exception(EngineDead("an illegal memory access"))
            self.in_work.clear()
            await death
        finally:
            self.in_work.discard(death)

    async def _live(self, death: asyncio.Future[None], seconds: float) -> None:
        done, _ = await asyncio.wait([death], timeout=seconds)
        if done:
            death.result()


@pytest.mark.parametrize("num_guilty", fast_ones([1, 3], [1]))
@pytest.mark.parametrize("num_samplers", fast_ones([1, 2], [2]))
async def test_requests_that_kill_after_their_first_token_fail_alone_beside_slow_ones(
    tmp_path: Path, num_samplers: int, num_guilty: int
) -> None:
    pair = Pair(Stack(tmp_path), [Late(), Late()])
    await pair.start()
    try:
        if num_samplers == 1:
            await pair.backends[1].stop()
            await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 1)
        marks = [200 + n for n in range(num_guilty)] + list(range(1, 9))
        async with Client(base_url=pair.stack.url, timeout=60) as client:
            sampler_id = await client.sampling_session(await client.session())
            calls = [client.call("asample", body(sampler_id, n, [mark] * 40)) for n, mark in enumerate(marks)]
            ids = await asyncio.gather(*calls)
            failures = await asyncio.gather(*(client.result(one) for one in ids[:num_guilty]))
            for request_id in ids[num_guilty:]:
                await answered(client, request_id)
    finally:
        await pair.stop()
    assert all("samplers ended while they computed this request" in failure["error"] for failure in failures)
    given: Counter[int] = sum((sampler.given for sampler in pair.samplers), Counter())
    assert set(given) == set(marks[:num_guilty])
    assert max(given.values()) <= 3


async def test_guilty_requests_with_one_content_kill_few_samplers_together(tmp_path: Path) -> None:
    """As the samples of one prompt, which differ only in their seeds."""
    pair = Pair(Stack(tmp_path), [Late(), Late()])
    await pair.start()
    try:
        async with Client(base_url=pair.stack.url, timeout=60) as client:
            sampler_id = await client.sampling_session(await client.session())
            calls = [client.call("asample", body(sampler_id, n, [200] * 40)) for n in range(8)]
            failures = await asyncio.gather(*(client.result(one) for one in await asyncio.gather(*calls)))
    finally:
        await pair.stop()
    assert all("samplers ended while they computed this request" in failure["error"] for failure in failures)
    # Each sampler dies once with many of them, once with one on trial, and once with one alone.
    assert sum(sampler.num_deaths for sampler in pair.samplers) <= 6


async def test_deaths_are_counted_across_restarts_of_the_gateway(tmp_path: Path) -> None:
    """Each restart comes after a death; the clients then send their samples again, as new ones."""
    pair = Pair(Stack(tmp_path), [Late(), Late()])
    await pair.start()

    def num_deaths() -> int:
        return sum(sampler.num_deaths for sampler in pair.samplers)

    async def send(client: Client) -> list[Any]:
        sampler_id = await client.sampling_session(await client.session())
        calls = [client.call("asample", body(sampler_id, n, [mark] * 40)) for n, mark in enumerate((200, 1, 2, 3))]
        return await asyncio.gather(*calls)

    try:
        async with Client(base_url=pair.stack.url, timeout=60) as client:
            await send(client)
            # Before the second sampler gets it, its death is written.
            await until(lambda: sum(sampler.given[200] for sampler in pair.samplers) == 2)
            await pair.stack.restart_gateway()
            failed, *others = await send(client)
            failure = await client.result(failed)
            for request_id in others:
                await answered(client, request_id)
            num_killed = num_deaths()
            await pair.stack.restart_gateway()
            again, *others = await send(client)
            told = f"{num_killed} samplers ended while they .* not given to another until [0-9]{{2}}:[0-9]{{2}} UTC; "
            assert re.match(told, (await client.result(again))["error"])
            for request_id in others:
                await answered(client, request_id)
    finally:
        await pair.stop()
    assert "samplers ended while they computed this request" in failure["error"]
    assert num_deaths() == num_killed <= 3


@pytest.mark.parametrize("error", [NotReady("the sampler is shutting down"), EngineDead("gone", computing="no")])
async def test_an_orderly_end_and_a_death_before_its_turn_are_not_held_against_a_request(
    pair: Pair, client: Client, error: NotReady
) -> None:
    sampler_id = await client.sampling_session(await client.session())
    for sampler in pair.samplers:
        sampler.refusals = [error] * 3
    await answered(client, await client.call("asample", body(sampler_id, 0, [1] * 40)))
    assert sum(pair.asked()) >= 4


async def test_a_request_that_waits_for_a_silent_trainer_says_so_and_goes_on_when_a_holder_is_back(
    pair: Pair, client: Client
) -> None:
    sampler_id, _ = await sampler_of_a_save(client, await client.session())
    pair.samplers[1].versions = {""}
    await pair.replicas.list_versions(BASE_MODEL)

    goes_on, answers = asyncio.Event(), asyncio.Event()
    trainer, answer = pair.stack.trainer, pair.stack.trainer.GetTrainerInfo

    async def publish(request: Any, context: Any) -> Any:
        await goes_on.wait()
        raise NotReady("no sampler can be reached")

    async def info(request: Any, context: Any) -> Any:
        await answers.wait()
        return await answer(request, context)

    answers.set()
    trainer.PublishCheckpoint, trainer.GetTrainerInfo = publish, info  # type: ignore[method-assign]
    await pair.stack.trainer_backend.stop()
    await pair.stack.trainer_backend.start()
    pair.proxies[0].thawed.clear()
    await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 1)
    receipt = await client.call("asample", body(sampler_id, 0, [1] * 40))
    waiting = (await client.poll(receipt["request_id"])).json()
    assert waiting["queue_state"] == "active"
    assert waiting["queue_state_reason"] == "publishing the weights to the sampler"
    answers.clear()
    waiting = (await client.poll(receipt["request_id"])).json()
    assert waiting["queue_state"] == "paused_capacity"
    assert "the trainer does not answer" in waiting["queue_state_reason"]
    pair.proxies[0].thawed.set()
    await answered(client, receipt)
    assert pair.asked()[0] == 1
    goes_on.set()
    answers.set()


async def test_a_version_is_sampled_where_it_is_and_published_to_who_lacks_it(pair: Pair, client: Client) -> None:
    sampler_id, _ = await sampler_of_a_save(client, await client.session())
    version_id = next(iter(pair.samplers[0].versions - {""}))
    await answered(client, await client.call("asample", body(sampler_id, 0, [1] * 40)))
    # One is started anew, and holds nothing.
    await pair.backends[1].stop()
    await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 1)
    pair.samplers[1].versions = {""}
    pair.samplers[1].requests.clear()
    await pair.backends[1].start()
    await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 2)
    receipts = [await client.call("asample", body(sampler_id, n, [n] * 40)) for n in range(1, 9)]
    for receipt in receipts:
        await answered(client, receipt)
    assert pair.stack.trainer.published == [version_id]
    await until(lambda: all(version_id in replica.versions for replica in pair.replicas.all))
    receipts = [await client.call("asample", body(sampler_id, n, [n] * 40)) for n in range(20, 30)]
    for receipt in receipts:
        await answered(client, receipt)
    assert pair.asked()[1] > 0
    assert pair.stack.trainer.published == [version_id]


async def test_a_version_stays_at_its_homes_until_these_are_busy(pair: Pair, client: Client) -> None:
    trainer, (home, other) = pair.stack.trainer, pair.samplers
    trainer.version_homes = 1
    home.max_running = other.max_running = 2
    for backend in (pair.stack.trainer_backend, *pair.backends):  # so that the gateway reads what they say
        await backend.stop()
        await backend.start()
    await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 2)
    sampler_id, _ = await sampler_of_a_save(client, await client.session())
    version_id = next(iter(home.versions - {""}))
    other.versions.discard(version_id)
    await answered(client, await client.call("asample", body(sampler_id, 0, [1] * 40)))
    await pair.replicas.list_versions(BASE_MODEL)
    for n in range(1, 4):
        await answered(client, await client.call("asample", body(sampler_id, n, [n] * 40)))
    assert trainer.published == []
    assert version_id not in other.versions
    home.go.clear()
    held = [await client.call("asample", body(sampler_id, n, [n] * 40)) for n in range(10, 14)]
    await until(lambda: version_id in other.versions)
    await until(lambda: all(version_id in replica.versions for replica in pair.replicas.all))
    before = pair.asked()[1]
    further = [await client.call("asample", body(sampler_id, n, [n] * 40)) for n in range(20, 28)]
    await until(lambda: pair.asked()[1] > before)
    home.go.set()
    for receipt in held + further:
        await answered(client, receipt)
    assert trainer.published == [version_id]


async def test_a_sampler_that_does_not_say_what_it_holds_delays_no_sample_at_the_other(
    pair: Pair, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_ASK_TIMEOUT_S", 1000)
    answers = asyncio.Event()
    lists = replicas.Replica.list_versions

    async def list_versions(replica: replicas.Replica) -> set[str]:
        if replica is pair.replicas.all[1]:
            await answers.wait()
        return await lists(replica)

    monkeypatch.setattr(replicas.Replica, "list_versions", list_versions)
    pair.stack.trainer.samplers[:] = pair.samplers[:1]
    for _ in range(2):  # one query still waits for the sampler when the second version is looked for
        sampler_id, _ = await sampler_of_a_save(client, await client.session())
        async with asyncio.timeout(60):
            await answered(client, await client.call("asample", body(sampler_id, 0, [1] * 40)))
    answers.set()


async def test_a_sampler_that_begins_to_serve_gets_a_version_at_once_though_others_lack_it_for_long(
    pair: Pair, client: Client
) -> None:
    sampler_id, _ = await sampler_of_a_save(client, await client.session())
    version_id = next(iter(pair.samplers[0].versions - {""}))
    home, other = pair.samplers
    other.versions = {""}
    pair.stack.trainer.samplers[:] = [home]  # the other one is full, as it were
    await answered(client, await client.call("asample", body(sampler_id, 0, [1] * 40)))
    await until(lambda: len(pair.stack.trainer.published) == 1)
    await answered(client, await client.call("asample", body(sampler_id, 1, [2] * 40)))
    await pair.backends[1].stop()
    await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 1)
    pair.stack.trainer.samplers[:] = pair.samplers
    await pair.backends[1].start()
    await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 2)
    await answered(client, await client.call("asample", body(sampler_id, 2, [3] * 40)))
    await until(lambda: version_id in other.versions)


async def test_a_version_that_one_has_evicted_is_sampled_at_the_other(pair: Pair, client: Client) -> None:
    sampler_id, _ = await sampler_of_a_save(client, await client.session())
    for n in range(8):
        await answered(client, await client.call("asample", body(sampler_id, n, [n] * 40)))
    pair.samplers[0].versions = {""}
    receipts = [await client.call("asample", body(sampler_id, n, [n] * 40)) for n in range(20, 30)]
    for receipt in receipts:
        await answered(client, receipt)
    await until(lambda: len(pair.samplers[0].versions) == 2)


async def test_a_sampler_that_was_silent_during_saves_has_its_generations_moved_to_the_newest(
    pair: Pair, client: Client
) -> None:
    session_id = await client.session()
    models = [await client.model(session_id, seq=n) for n in (0, 1)]
    for model_id in models:
        await save(client, model_id, 1, path="a1")
    silent, other = pair.samplers
    for model_id in models:
        silent.running[f"{model_id}@1"] = 3
    silent.running["nobody@7"] = 1
    silent.versions.add("nobody@7")
    await until(lambda: len(silent.moves) == len(other.moves) == 2)
    pair.proxies[0].thawed.clear()
    await until(lambda: len(pair.replicas.usable(BASE_MODEL)) == 1)
    pair.stack.trainer.samplers[:] = [other]
    await save(client, models[0], 2, path="a2")
    await save(client, models[0], 3, path="a3")
    await until(lambda: len(other.moves) == 4)
    assert len(silent.moves) == 2
    pair.stack.trainer.samplers[:] = pair.samplers
    pair.proxies[0].thawed.set()
    await until(lambda: silent.running[f"{models[0]}@3"] == 3)
    assert silent.moves[2:] == [(models[0], f"{models[0]}@3")]
    assert pair.stack.trainer.published == [f"{models[0]}@3"]
    assert silent.running[f"{models[1]}@1"] == 3


async def test_the_gateway_is_healthy_while_each_model_has_a_sampler(pair: Pair, client: Client) -> None:
    await pair.backends[1].stop()
    await pair.stack.restart_gateway()
    assert (await client.get("/api/v1/healthz")).status_code == 200
    models = (await client.get("/api/v1/get_server_capabilities")).json()["supported_models"]
    assert [model["sampleable"] for model in models] == [True, True]


# Streams of the OpenAI API


@pytest.fixture
async def talkers(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(Stack(tmp_path), [TalkingSampler(), TalkingSampler()])
    await pair.start()
    yield pair
    await pair.stop()


async def events(pair: Pair, **fields: Any) -> list[Any]:
    asked = {"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 100, "stream": True} | fields
    async with Client(base_url=pair.stack.url, timeout=20) as client:
        reply = await client.post("/v1/completions", json=asked)
    assert reply.status_code == 200
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events: list[Any], *, index: int = 0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.mark.parametrize("how", ["lost", "dead", "silent"])
async def test_a_stream_goes_on_at_another_sampler_where_it_was(talkers: Pair, how: str) -> None:
    undisturbed = await events(talkers, n=2)
    first = next(sampler for sampler in talkers.samplers if sampler.requests)
    n, other = talkers.samplers.index(first), talkers.samplers[1 - talkers.samplers.index(first)]
    if how != "silent":
        first.error, first.error_after = (NotReady if how == "lost" else EngineDead)("going down"), 4
        streamed = await events(talkers, n=2)
    else:
        first.pauses = True
        first.go.clear()
        streaming = asyncio.create_task(events(talkers, n=2))
        await until(lambda: len(first.requests) == 2)
        await asyncio.sleep(0.1)  # the three tokens are out
        talkers.proxies[n].thawed.clear()
        streamed = await streaming
    assert text_of(streamed) == text_of(streamed, index=1) == text_of(undisturbed)
    assert streamed[-1] == "[DONE]"
    assert len(other.requests) == 1
    seeds = [request.sampling_params.seed for request in (first.requests[-1], other.requests[0])]
    assert seeds[0] == seeds[1] != first.requests[0].sampling_params.seed


async def test_a_stream_that_would_go_on_differently_fails(talkers: Pair) -> None:
    await events(talkers)
    first = next(sampler for sampler in talkers.samplers if sampler.requests)
    other = next(sampler for sampler in talkers.samplers if not sampler.requests)
    first.error, first.error_after = NotReady("going down"), 4
    other.says = "the sun ❄ and the sand"
    streamed = await events(talkers)
    assert "differ from those sent" in streamed[-1]["error"]["message"]
    assert other.says.startswith(text_of(streamed[:-1])) is False or text_of(streamed[:-1]) in first.says


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "the snow"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the snow"}]}),
    ],
)
async def test_a_text_that_kills_two_samplers_while_it_becomes_tokens_is_given_to_no_third(
    talkers: Pair, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    num_deaths = 0

    async def die(self: TalkingSampler, request: Any, context: Any) -> Any:
        nonlocal num_deaths
        num_deaths += 1
        raise EngineDead("ended")

    monkeypatch.setattr(TalkingSampler, "Tokenize", die)
    await talkers.stop()  # handlers are bound when a server starts
    await talkers.start()
    async with Client(base_url=talkers.stack.url, timeout=20) as client:
        reply = await client.post(path, json={"model": BASE_MODEL, "max_tokens": 4, **asked})
    assert reply.status_code == 500
    assert "2 samplers ended while they computed this request" in reply.text
    assert num_deaths == 2
