"""Transactions that the database has, and whose end nobody heard of."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import event

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


class Statements:
    """Statements sent to the database: all of them, and those of each task since it last took them."""

    def __init__(self, store: Store) -> None:
        self.of_all: list[str] = []
        self._of: defaultdict[asyncio.Task[object] | None, list[str]] = defaultdict(list)
        event.listen(store._engine.sync_engine, "before_cursor_execute", self._note)

    def _note(self, _connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        self.of_all.append(statement)
        self._of[asyncio.current_task()].append(statement)

    def taken(self) -> list[str]:
        return self._of.pop(asyncio.current_task(), [])


def lost() -> None:
    raise ConnectionResetError("connection lost")
