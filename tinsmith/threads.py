"""Blocking calls beside the event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

from tinsmith.errors import storable

P = ParamSpec("P")
T = TypeVar("T")


async def in_pool(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a call on a thread of the event loop's own pool. See `in_pool_of`."""
    return await in_pool_of(None, call, *args, **kwargs)


async def in_pool_of(pool: Executor | None, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a call on a thread of `pool`, with the caller's context variables, which hold the ids for log lines. None is
    the event loop's own pool.

    A StopIteration of the call becomes a RuntimeError. Before Python 3.12, asyncio.to_thread and run_in_executor lose a
    StopIteration, and their callers wait for ever.
    """
    context = contextvars.copy_context()

    def run() -> T:
        try:
            return context.run(call, *args, **kwargs)
        except StopIteration as error:
            raise storable(error) from error

    return await asyncio.get_running_loop().run_in_executor(pool, run)
