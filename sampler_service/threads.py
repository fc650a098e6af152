"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from tinsmith.errors import storable

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a daemon thread of its own.

    Unlike in_pool, a wait that takes its full timeout (a lost trainer, a model that is loading) does not hold
    up the end of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def report(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # no error: a result

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except StopIteration as raised:
            error = storable(raised)
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(report, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await future
