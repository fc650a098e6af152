"""Tables of scores are read, checked and written on one thread beside the event loop, in the order in which they come.

A dense table of 64 MB holds up the loop for half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tinsmith.threads import in_pool_of

T = TypeVar("T")

_thread = ThreadPoolExecutor(1, thread_name_prefix="large-messages")


async def run(work: Callable[[], T]) -> T:
    """Does `work` on the thread for large messages."""
    return await in_pool_of(_thread, work)
