"""The metric of the event loop shows work that keeps it from others, and nothing else."""

from __future__ import annotations

import asyncio
import threading
import time

from gateway.load import watch_event_loop
from gateway.metrics import Metrics
from tests.support.waiting import until

STALL_S = 0.15


def compute(*, until_s: float) -> None:
    """Takes this much processor time of this thread."""
    began = time.thread_time()
    while time.thread_time() - began < until_s:
        pass


def observed(metrics: Metrics, *, above_s: float) -> float:
    def count(most_s: str) -> float:
        found = metrics.registry.get_sample_value("gateway_event_loop_seconds_bucket", {"le": most_s})
        assert found is not None
        return found

    return count("+Inf") - count(str(above_s))


def number(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("gateway_event_loop_seconds_count") or 0.0


async def test_work_on_the_event_loop_is_a_stall_and_work_of_another_thread_is_none() -> None:
    metrics = Metrics()
    watching = asyncio.create_task(watch_event_loop(metrics.http.event_loop_seconds))
    await until(lambda: number(metrics) > 0)
    thread = threading.Thread(target=compute, kwargs={"until_s": STALL_S})
    thread.start()
    before = number(metrics)
    await until(lambda: not thread.is_alive() and number(metrics) > before)
    assert observed(metrics, above_s=0.1) == 0
    compute(until_s=STALL_S)
    await until(lambda: observed(metrics, above_s=0.1) > 0)
    assert observed(metrics, above_s=0.1) == 1
    watching.cancel()
