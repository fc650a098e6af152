"""The SDK leaves its sockets to the garbage collector, which may come to them in any test."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton as _sdk

_LEFT_SOCKET = r"Exception ignored in. <(socket\.socket|function _SelectorTransport\.__del__)"


@pytest.fixture(scope="module", autouse=True)
def close_left_sockets() -> Iterator[None]:
    """For a conftest.py to import: they go with the file that has left them."""
    yield
    loop = _sdk.loop_if_started()
    if loop is None:
        return
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        for _ in range(2):  # clients that nobody has closed do it when they are collected, with a last request
            gc.collect()
            asyncio.run_coroutine_threadsafe(_close_sockets(loop), loop).result(timeout=10)


async def _close_sockets(loop: asyncio.AbstractEventLoop) -> None:
    """Also those that are still referred to: nobody sends over them any more."""
    for transport in [one for one in gc.get_objects() if issubclass(type(one), asyncio.Transport)]:
        if getattr(transport, "_loop", None) is loop:
            transport.abort()
    await asyncio.sleep(0.05)


def allow_left_sockets(items: Sequence[pytest.Item], folder: Path) -> None:
    """Until then they are no failures of the folder's tests."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed (transport )?<:ResourceWarning"))
            item.add_marker(
                pytest.mark.filterwarnings(f"ignore:{_LEFT_SOCKET}:pytest.PytestUnraisableExceptionWarning")
            )
