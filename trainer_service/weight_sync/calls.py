"""Runs several calls of the weight channel at once, and ends all when one fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from typing import TypeVar

from tinsmith.errors import storable
from tinsmith.faults import is_lasting_fault

T = TypeVar("T")


class ChannelBroken(Exception):
    """The group, or one of its members, can no longer be used."""

    def __init__(self, message: str, *, epoch: int = 0) -> None:
        """`epoch`: the member's epoch; the next group's epoch must be higher. 0 when it is unknown."""
        super().__init__(message)
        self.epoch = epoch
        self.addresses: Collection[str] = ()
        """Addresses of the group's members, where several groups were in use at once."""


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Runs a blocking call of a transport on a daemon thread: the call cannot be stopped, and must not delay the exit.

    Transports raise RuntimeError, which becomes ChannelBroken, unless the device is broken.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except RuntimeError as error:
            done.set_exception(error if is_lasting_fault(error) else ChannelBroken(str(error)))
        except StopIteration as error:
            done.set_exception(storable(error))
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="weight-channel", daemon=True).start()
    return asyncio.wrap_future(done)


async def all_of(*awaitables: Awaitable[T]) -> list[T]:
    """Returns all results. Raises the first error at once: the other calls are cancelled, and threads run on until
    their timeouts."""
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
