"""Outages: a database that cannot be used for a while, because its disk is full, it restarts, or it is unreachable."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnection

from tinsmith.tasks import Pause

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PASSING = ("08", "25", "40", "53", "57", "58")
"""Classes of PostgreSQL's codes for errors that pass: connection, read-only, rolled back, no resources, shutdown,
system."""

TRY_AGAIN = "the gateway's database cannot be used at the moment; try again"


class DatabaseUnusable(SQLAlchemyError):
    """The error that `Database.begin` raises in every outage. SQLAlchemy has no common one: a failed connection, for
    example, raises an error that is not SQLAlchemy's."""


def is_outage(error: BaseException) -> bool:
    """Whether the statement that failed may succeed later. False when the statement itself is wrong."""
    if isinstance(error, DatabaseUnusable):
        return True
    cause = error.orig if isinstance(error, DBAPIError) else error
    if (
        code := getattr(cause, "sqlstate", None)
    ) is not None:  # an error of asyncpg, which is not wrapped while it connects
        return str(code)[:2] in _PASSING
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or isinstance(error, OperationalError)
    return isinstance(error, (OSError, NoConnection))


def in_words(error: BaseException) -> str:
    """The text of the error, without the statement and its values."""
    return str(error.orig if isinstance(error, DBAPIError) else error)


def log_failure(what: str, error: Exception, *, by: logging.Logger) -> None:
    """Logs a failure of background work that is tried again. An outage is logged without a traceback."""
    by.error("%s; it is tried again: %s", what, in_words(error), exc_info=not is_outage(error))


async def until_written(write: Callable[[], Awaitable[T]], *, what: str, pausing: Callable[[str], object]) -> T:
    """Calls `write` again after each outage until it succeeds, and returns its result. Raises any other error.

    `write` must be repeatable after any part of it was done. `pausing` is called with a reason before each wait.
    """
    pause, is_logged = Pause(), False
    while True:
        try:
            return await write()
        except Exception as error:
            if not is_outage(error):
                raise
            if not is_logged:
                is_logged = True
                logger.error("%s cannot be written to the database now; it is tried again: %s", what, in_words(error))
        pausing("the work is done, and waits for the gateway's database, which cannot be used at the moment")
        await pause.wait()
