"""Work of the channel that is done side by side, and what has become of it when a part fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class ChannelBroken(Exception):
    """The group, or one of its members, is of no use any more."""

    def __init__(self, message: str, *, epoch: int = 0) -> None:
        """`epoch`: a member's, above which the next group's must be."""
        super().__init__(message)
        self.epoch = epoch


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Runs a blocking call of a transport. It cannot be stopped, so its thread must not hold up the exit.

    RuntimeError, which is what such a call raises, becomes ChannelBroken.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except RuntimeError as error:
            done.set_exception(ChannelBroken(str(error)))
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="weight-channel", daemon=True).start()
    return asyncio.wrap_future(done)


async def all_of(*awaitables: Awaitable[T]) -> list[T]:
    """The results; or the first error, at once: the others are cancelled, and threads left to their timeouts."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
