"""Samples of clients that were killed, or that cannot reach the server: `gateway/sampling/silent_clients.py`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.config import GatewayConfig
from gateway.sampling.silent_clients import SilentClients
from tests.unit.gateway.stack import Client, Stack, sample_body

TIMEOUT_S = 60.0
pytestmark = pytest.mark.gateway(sample_client_timeout_s=TIMEOUT_S, long_poll_s=0.05)


class Clock:
    """Stands for `time` in the modules that note when a client was heard of."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def time(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    stand_in = SimpleNamespace(monotonic=clock.monotonic, time=clock.time)
    for module in ("futures", "sampling.samples", "sampling.silent_clients", "database.sessions"):
        monkeypatch.setattr(f"gateway.{module}.time", stand_in)
    return clock


@pytest.fixture
def silent_clients(stack: Stack) -> SilentClients:
    return stack.gateway.sampling.silent_clients


class Sampling:
    """A client with one sample in work at the sampler."""

    def __init__(self, client: Client, session_id: str, sampler_id: str, receipt: dict[str, Any]) -> None:
        self.client, self.session_id, self.sampler_id, self.receipt = client, session_id, sampler_id, receipt

    async def polls(self) -> Any:
        return await self.client.call("retrieve_future", self.receipt)

    async def polls_for_all(self) -> Any:
        target = {"type": "sampling_session", "sampling_session_id": self.sampler_id, "cloned_sampler_id": 0}
        return await self.client.call("retrieve_futures", {"target": target, "timeout": 0})

    async def beats(self) -> Any:
        return await self.client.call("session_heartbeat", {"session_id": self.session_id})


@pytest.fixture
async def sampling(stack: Stack, client: Client) -> Sampling:
    session_id = await client.session()
    sampler_id = await client.sampling_session(session_id)
    stack.sampler.go.clear()
    receipt = await client.call("asample", sample_body(sampler_id, 0))
    await stack.sampler.called.wait()
    return Sampling(client, session_id, sampler_id, receipt)


async def test_a_sample_of_a_killed_client_is_stopped(
    stack: Stack, sampling: Sampling, silent_clients: SilentClients, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await silent_clients.look()
    clock.ahead_s = TIMEOUT_S - 5
    await silent_clients.look()
    assert stack.gateway.futures.num_pending("asample") == 1
    clock.ahead_s = TIMEOUT_S + 5
    await silent_clients.look()
    async with asyncio.timeout(10):
        await stack.sampler.cancelled.wait()
    assert f"session {sampling.session_id} was silent for 60 s" in caplog.text


async def test_a_client_that_comes_back_samples_again(
    stack: Stack, sampling: Sampling, silent_clients: SilentClients, clock: Clock
) -> None:
    await silent_clients.look()
    clock.ahead_s = TIMEOUT_S + 5
    await silent_clients.look()
    async with asyncio.timeout(10):
        await stack.sampler.cancelled.wait()
    completions = (await sampling.polls_for_all())["completions"]
    assert completions == [{"state": "failed", "request_id": sampling.receipt["request_id"]}]
    await sampling.client.call("retrieve_future", sampling.receipt, status=410)
    stack.sampler.go.set()
    again = await sampling.client.call("asample", sample_body(sampling.sampler_id, 0))
    assert isinstance(await sampling.client.result(again), bytes)


@pytest.mark.parametrize("sign", [Sampling.polls, Sampling.polls_for_all, Sampling.beats])
async def test_one_sign_of_life_is_enough(
    stack: Stack,
    sampling: Sampling,
    silent_clients: SilentClients,
    clock: Clock,
    sign: Callable[[Sampling], Any],
) -> None:
    """Ten looks, and a sign before each."""
    await silent_clients.look()
    for _ in range(10):
        clock.ahead_s += TIMEOUT_S - 5
        await sign(sampling)
        await silent_clients.look()
    stack.sampler.go.set()
    assert isinstance(await sampling.client.result(sampling.receipt), bytes)


@pytest.mark.gateway(reap_interval_s=3600.0)
async def test_a_gateway_that_was_stopped_has_heard_nobody(
    stack: Stack, sampling: Sampling, silent_clients: SilentClients, clock: Clock
) -> None:
    """Its clients get the whole time anew."""
    await silent_clients.look()
    clock.ahead_s = 3 * 3600.0
    await silent_clients.look()
    clock.ahead_s += TIMEOUT_S - 5
    await silent_clients.look()
    assert stack.gateway.futures.num_pending("asample") == 1
    clock.ahead_s += 10
    await silent_clients.look()
    async with asyncio.timeout(10):
        await stack.sampler.cancelled.wait()


async def test_the_samples_of_others_go_on(
    stack: Stack, sampling: Sampling, silent_clients: SilentClients, clock: Clock
) -> None:
    other_session = await sampling.client.session()
    other = await sampling.client.call("asample", sample_body(await sampling.client.sampling_session(other_session), 0))
    await silent_clients.look()
    clock.ahead_s = TIMEOUT_S + 5
    await sampling.client.call("session_heartbeat", {"session_id": other_session})
    await silent_clients.look()
    async with asyncio.timeout(10):
        await stack.sampler.cancelled.wait()
    stack.sampler.go.set()
    assert isinstance(await sampling.client.result(other), bytes)


def test_a_time_that_leaves_none_for_a_poll_is_refused() -> None:
    with pytest.raises(ValidationError, match="sample_client_timeout_s 20 must be more than long_poll_s 30"):
        GatewayConfig(sample_client_timeout_s=20)
