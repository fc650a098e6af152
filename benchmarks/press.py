"""Many requests at once: a thousand samples of one client, while two hundred sessions are open.

Shared by load.py, which reports the times, and by a test, which holds that nobody sees an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field

import httpx
import tinker
from tinker import ModelInput, SamplingParams

SDK_SHARE = 20
_KEY = "TINKER_API_KEY"
_BEAT_S = 10.0
"""Interval of heartbeats in seconds, which is that of the SDK."""
_ASK_S = 0.05


@dataclass(slots=True)
class Times:
    """Measured times, in seconds."""

    samples: list[float] = field(default_factory=list)
    """From the call of the SDK to the tokens."""
    sessions: list[float] = field(default_factory=list)
    """From the creation of a session to its first sample."""
    heartbeats: list[float] = field(default_factory=list)
    trivial: list[float] = field(default_factory=list)
    """Requests to client/dynamic_config, which only the event loop can delay."""
    errors: list[str] = field(default_factory=list)
    """Unexpected answers to heartbeats and trivial requests."""
    seconds: float = 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def press(
    url: str, base_model: str, *, api_key: str, num_samples: int, num_sessions: int, num_tokens: int = 8
) -> Times:
    """Puts the load on the server. One session in SDK_SHARE is a client of the SDK, which opens while the samples are
    drawn; the others only send heartbeats. Raises the SDK's errors."""
    num_clients = num_sessions // SDK_SHARE
    times = Times()
    began = time.monotonic()
    with (
        _watched(url, api_key, num_sessions - num_clients, times),
        tinker.ServiceClient(base_url=url, api_key=api_key) as service,
        ThreadPoolExecutor(16) as threads,
    ):
        sampler = service.create_sampling_client(base_model=base_model).result()
        params = SamplingParams(max_tokens=num_tokens, temperature=1.0, stop=[])
        opened: list[tinker.ServiceClient] = []
        opening = [
            threads.submit(_session, url, base_model, api_key, params, n, times, opened) for n in range(num_clients)
        ]
        asyncio.run(_sample(sampler, params, num_samples, times))
        for one in opening:
            one.result()
        list(threads.map(lambda one: one.close("success").result(), opened))
    times.seconds = time.monotonic() - began
    return times


@contextmanager
def _watched(url: str, api_key: str, num_sessions: int, times: Times) -> Iterator[None]:
    """The sessions that only beat are a process of their own: what this one is busy with must not count as waiting."""
    command = [sys.executable, __file__, url, str(num_sessions)]
    watch = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, _KEY: api_key}
    )
    try:
        assert watch.stdout is not None
        watch.stdout.readline()  # its sessions are open
        yield
    finally:
        output, _ = watch.communicate()  # closes its stdin, on which it ends
    found = json.loads(output)
    times.heartbeats, times.trivial = found["heartbeats"], found["trivial"]
    times.errors += found["errors"]


def _prompt(number: int) -> ModelInput:
    return ModelInput.from_ints([(number * 31 + position) % 1000 for position in range(16)])


async def _sample(sampler: tinker.SamplingClient, params: SamplingParams, count: int, times: Times) -> None:
    async def one(number: int) -> None:
        began = time.monotonic()
        drawn = await sampler.sample(_prompt(number), 1, params)
        assert len(drawn.sequences[0].tokens) == params.max_tokens
        times.samples.append(time.monotonic() - began)

    await asyncio.gather(*(one(number) for number in range(count)))


def _session(
    url: str,
    base_model: str,
    api_key: str,
    params: SamplingParams,
    number: int,
    times: Times,
    opened: list[tinker.ServiceClient],
) -> None:
    began = time.monotonic()
    service = tinker.ServiceClient(base_url=url, api_key=api_key)
    opened.append(service)
    sampler = service.create_sampling_client(base_model=base_model).result()
    sampler.sample(_prompt(number), 1, params).result()
    times.sessions.append(time.monotonic() - began)


async def _watch(url: str, api_key: str, times: Times, num_sessions: int, done: threading.Event) -> None:
    """Runs a client for each session, which only sends heartbeats, and one that sends trivial requests.

    Each client has connections of its own, as separate processes would. A shared pool of httpx looks at every
    connection for every request, and the heartbeats would wait longer for that than for the gateway."""
    tls = ssl.create_default_context()

    def client() -> httpx.AsyncClient:
        headers = {"x-api-key": api_key}
        return httpx.AsyncClient(base_url=f"{url}/api/v1/", headers=headers, timeout=60, trust_env=False, verify=tls)

    async def ask(
        http: httpx.AsyncClient, path: str, body: dict[str, object], into: list[float]
    ) -> httpx.Response | None:
        began = time.monotonic()
        try:
            reply = await http.post(path, json=body)
        except httpx.TransportError as error:
            times.errors.append(f"{path}: {type(error).__name__}: {error}")
            return None
        into.append(time.monotonic() - began)
        if reply.status_code != 200:
            times.errors.append(f"{path}: {reply.status_code}: {reply.text}")
            return None
        return reply

    async def beat(number: int, http: httpx.AsyncClient, session_id: str) -> None:
        body: dict[str, object] = {"session_id": session_id}
        await asyncio.sleep(_BEAT_S * number / max(1, num_sessions))
        await _until(done, _BEAT_S, lambda: ask(http, "session_heartbeat", body, times.heartbeats))
        await ask(http, f"sessions/{session_id}/finish", {"reason": {"type": "success"}}, [])

    async with AsyncExitStack() as stack:
        first, *others = [await stack.enter_async_context(client()) for _ in range(num_sessions + 1)]
        body = {"tags": ["load"], "type": "create_session"}
        made = await asyncio.gather(*(ask(http, "create_session", body, []) for http in others))
        print("watching", flush=True)
        asking = _until(done, _ASK_S, lambda: ask(first, "client/dynamic_config", {}, times.trivial))
        beating = [
            beat(number, http, reply.json()["session_id"])
            for number, (http, reply) in enumerate(zip(others, made, strict=True))
            if reply is not None
        ]
        await asyncio.gather(asking, *beating)


async def _until(done: threading.Event, pause_s: float, step: Callable[[], Awaitable[object]]) -> None:
    while not done.is_set():
        began = time.monotonic()
        await step()
        await asyncio.sleep(max(0.0, pause_s - (time.monotonic() - began)))


def main() -> None:
    """Main function of the watching process, which runs until its standard input ends."""
    done, times = threading.Event(), Times()

    def wait() -> None:
        sys.stdin.read()
        done.set()

    threading.Thread(target=wait).start()
    asyncio.run(_watch(sys.argv[1], os.environ[_KEY], times, int(sys.argv[2]), done))
    print(json.dumps({"heartbeats": times.heartbeats, "trivial": times.trivial, "errors": times.errors}))


if __name__ == "__main__":
    main()
