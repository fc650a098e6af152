"""Reports of the services about their work: what it waits for, and when it ran."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from gateway.futures import Pending, Progress
from tinsmith.formatting import duration_text
from tinsmith.rpc.errors import ServiceError
from tinsmith.rpc.server import RAN
from tinsmith.rpc.times import seconds_of
from tinsmith.v1 import types_pb2

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 0.5


def ran_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[float, float] | None:
    """Begin and end of the computation, in seconds since 1970, from a call's trailing metadata; None when absent."""
    for key, value in metadata or ():
        if key == RAN:
            start, _, end = str(value).partition(":")
            try:
                return float(start), float(end)
            except ValueError:
                logger.warning("%s: %r is not <start>:<end>", RAN, value)
    return None


async def explain(pending: Pending) -> Progress:
    """Explains what pending work waits for: in the service's words if it answers, else in the gateway's."""
    if pending.ask is None:
        return pending.progress
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            status = await pending.ask()
    except (TimeoutError, ServiceError) as error:
        logger.debug("cannot ask what %s waits for: %s", pending.request_id, error)
        return pending.progress
    return in_words(status)


def in_words(status: types_pb2.QueueStatus) -> Progress:
    """The service's text, with the position in the queue and the expected time.

    Work behind other work is "paused_capacity". Work that waits for its client is not.
    """
    facts = [f"position {status.position + 1}"] if status.position else []
    if status.HasField("expected_time"):
        facts.append(f"done in about {duration_text(seconds_of(status.expected_time))}")
    reason = f"{status.reason} ({', '.join(facts)})" if facts else status.reason
    return Progress("paused_capacity" if status.position else "active", reason)
