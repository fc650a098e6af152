"""A gateway in front of the fakes of the unit tests, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.unit.gateway.stack import ALIAS, Client, Stack
from tests.unit.gateway.talking import TalkingSampler


class FakeServer:
    """`with FakeServer(state_dir) as server:` serves at `server.url`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.url = ""
        self.known: dict[str, str] = {}
        """Ids that exist, by the name of the field that takes them."""

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        stack = Stack(self._state_dir, TalkingSampler())
        try:
            async with stack.serving(long_poll_s=0.05, openai_wait_s=0.1):
                async with Client(base_url=stack.url, headers={"x-api-key": "tml-test"}) as client:
                    self.known = await make_some(client)
                self.url = stack.url
                self._ready.set()
                await self._stop.wait()
        finally:
            self._ready.set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(30)
        assert self.url, "the gateway did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


async def make_some(client: Client, *, base_model: str = ALIAS) -> dict[str, str]:
    """One of each thing that requests can name."""
    session_id = await client.session()
    model_id = await client.model(session_id, base_model=base_model)
    save = {"model_id": model_id, "seq_id": 1, "path": "known"}
    path = (await client.result(await client.call("save_weights_for_sampler", save)))["path"]
    sampler_id = await client.sampling_session(session_id, base_model=base_model)
    return {
        "session_id": session_id,
        "model_id": model_id,
        "run_id": model_id,
        "kind": "sampler_weights",
        "name": "known",
        "model_path": path,
        "tinker_path": path,
        "source_path": path,
        "sampling_session_id": sampler_id,
        "request_id": f"{model_id}:1",
        "base_model": base_model,
        "model": base_model,
    }
