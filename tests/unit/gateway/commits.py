"""Transactions that the database has, and whose end nobody heard of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from gateway.database.store import Store


@contextlib.contextmanager
def commits(store: Store, after: Callable[[], None], *, of: asyncio.Task[object] | None = None) -> Iterator[None]:
    """Meanwhile `after` is called behind every COMMIT, or every one of that task, before who wanted it hears of it."""
    dialect = store._engine.sync_engine.dialect

    def commit(connection: Any) -> None:
        type(dialect).do_commit(dialect, connection)
        if of is None or asyncio.current_task() is of:
            after()

    dialect.do_commit = commit  # type: ignore[method-assign]
    try:
        yield
    finally:
        del dialect.do_commit


def lost() -> None:
    raise ConnectionResetError("connection lost")
