"""Blocking calls beside the event loop: whoever waits for one hears of its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sampler_service import large, threads
from tinsmith.threads import in_pool, in_pool_of
from trainer_service.weight_sync import calls

SERVICES = ("gateway", "trainer_service", "sampler_service", "tinsmith", "tinsmith_cli")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "run",
    [in_pool, partial(in_pool_of, ThreadPoolExecutor(1)), large.run, threads.in_thread, calls.in_thread],
    ids=["default pool", "own pool", "large messages", "daemon thread", "weight channel"],
)
async def test_a_stop_iteration_ends_the_wait_for_a_thread(run: Callable[..., Any]) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await run(lambda: next(iter(())))


def test_no_service_calls_a_pool_in_another_way() -> None:
    """The others lose a StopIteration."""
    files = [path for name in SERVICES for path in (ROOT / name).rglob("*.py")]
    assert len(files) > 100
    found = [path for path in files if ".to_thread(" in (text := path.read_text()) or ".run_in_executor(" in text]
    assert found == [ROOT / "tinsmith/threads.py"]


async def test_a_call_has_its_arguments_and_the_callers_context_variables() -> None:
    request_id: ContextVar[str] = ContextVar("request_id")
    request_id.set("one")
    assert await in_pool(lambda a, *, b: (a, b, request_id.get()), 1, b=2) == (1, 2, "one")
