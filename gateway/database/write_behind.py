"""Writing behind: rows gather in memory, and are written to the database in the background. No client waits for them.

A gateway that is killed loses the rows of the last `every_s` seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sqlalchemy.exc import SQLAlchemyError

from gateway.database.outages import log_failure
from tinsmith.tasks import set_within, to_its_end

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
"""Default pause between two writes, in seconds."""


class WriteBehind:
    """Calls `write` every `every_s` seconds, one call at a time. If `write` fails, it keeps the rows, within a bound of
    its own, for the next call."""

    def __init__(self, write: Callable[[], Awaitable[None]], *, what: str, every_s: float | None = None) -> None:
        """`what`: subject of the log line about a failure. `every_s` None means FLUSH_S."""
        self._write = write
        self._what = what
        self._every_s = every_s
        self._writing = asyncio.Lock()
        self._asked = asyncio.Event()
        """Set when `run` should not wait for `every_s`."""
        self._next_end = asyncio.Event()
        """Set when the next call of `write` has ended, with or without success."""

    async def run(self) -> None:
        while True:
            await set_within(self._asked, FLUSH_S if self._every_s is None else self._every_s)
            self._asked.clear()
            try:
                await self.flush()
            except SQLAlchemyError as error:
                log_failure(f"{self._what} cannot be written", error, by=logger)

    async def flush(self) -> None:
        """Writes the rows that have gathered. Raises SQLAlchemyError."""
        await to_its_end(self._locked())

    async def next_write(self) -> None:
        """Waits until the next write has ended, with or without success."""
        await self._next_end.wait()

    async def hurry(self, wait_s: float) -> None:
        """Makes `run` write at once, one time for all callers. Waits until that write has ended, with or without
        success, but at most `wait_s`."""
        self._asked.set()
        await set_within(self._next_end, wait_s)

    async def _locked(self) -> None:
        async with self._writing:
            ended, self._next_end = self._next_end, asyncio.Event()
            try:
                await self._write()
            finally:
                ended.set()
