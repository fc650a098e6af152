"""Futures by itself, without HTTP and services: who is woken, what is counted, and what ends work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.database.store import Store
from gateway.futures import Answer, FutureProgress, Futures, Gone, Pending, failed
from gateway.metrics import Metrics
from gateway.tenants.ledger import Ledger
from tinsmith.errors import FailedPrecondition, ModelNotFound

MODEL, OTHER_MODEL = "s:train:0", "s:train:1"
SAMPLE = "s:sample:0:0"
ANSWER = Answer(b"{}")


@pytest.fixture
async def futures(tmp_path: Path) -> AsyncIterator[Futures]:
    metrics = Metrics()
    store = Store(f"sqlite+aiosqlite:///{tmp_path / 'unused.db'}", metrics)
    yield Futures(cache_bytes=1 << 20, metrics=metrics, ledger=Ledger(store))
    await store.close()


def start(futures: Futures, request_id: str, *, kind: str = "forward_backward", group: str = MODEL) -> Pending:
    """Starts work that never ends by itself."""
    pending = Pending(request_id, kind=kind, group=group, fingerprint="f")

    async def work() -> Answer:
        await asyncio.Event().wait()
        return ANSWER

    futures.start(pending, work())
    return pending


async def test_a_future_that_failed_at_once_keeps_its_answer_and_the_fingerprint_of_its_request(
    futures: Futures,
) -> None:
    error = ModelNotFound("no model")
    futures.fail(f"{MODEL}:1", error, fingerprint="mine")
    assert futures.fingerprint(f"{MODEL}:1") == "mine"
    assert await futures.poll(f"{MODEL}:1", timeout_s=0) == failed(error)
    futures.fail(f"{MODEL}:1", ModelNotFound("again"), fingerprint="other")
    assert futures.fingerprint(f"{MODEL}:1") == "mine"
    assert futures.answer(f"{MODEL}:1") == failed(error)


async def test_work_is_counted_by_kind_and_group_while_it_runs(futures: Futures) -> None:
    start(futures, f"{MODEL}:1"), start(futures, f"{MODEL}:2"), start(futures, f"{OTHER_MODEL}:1", group=OTHER_MODEL)
    kinds = [futures.num_pending(name) for name in ("forward_backward", MODEL, OTHER_MODEL, "asample")]
    assert (kinds, futures.busy_models()) == ([3, 2, 1, 0], [MODEL, OTHER_MODEL])
    await asyncio.sleep(0)  # the work begins
    await futures.close()
    assert [futures.num_pending(name) for name in ("forward_backward", MODEL, OTHER_MODEL)] == [0, 0, 0]
    assert futures.busy_models() == []


async def test_a_poll_that_ends_without_an_answer_leaves_no_waiter(futures: Futures) -> None:
    pending = start(futures, f"{MODEL}:1")
    for _ in range(3):
        assert await futures.poll(f"{MODEL}:1", timeout_s=0) == FutureProgress()
    assert pending.waiters == set()
    polling = asyncio.create_task(futures.poll(f"{MODEL}:1", timeout_s=60))
    await asyncio.sleep(0)
    assert len(pending.waiters) == 1
    polling.cancel()
    await asyncio.wait([polling])
    assert pending.waiters == set()
    await futures.close()


async def test_cancelling_one_models_work_answers_it_and_spares_the_others(futures: Futures) -> None:
    mine, other = start(futures, f"{MODEL}:1"), start(futures, f"{OTHER_MODEL}:1", group=OTHER_MODEL)
    polling = asyncio.create_task(futures.poll(f"{MODEL}:1", timeout_s=60))
    await asyncio.sleep(0)
    error = ModelNotFound("deleted")
    futures.cancel(lambda group: group == MODEL, error=error)
    assert await polling == failed(error)
    assert mine.task is not None
    assert mine.task.done()
    assert futures.busy_models() == [OTHER_MODEL]
    assert (other.answer, await futures.poll(f"{OTHER_MODEL}:1", timeout_s=0)) == (None, FutureProgress())
    await futures.close()


async def test_only_running_work_of_the_named_kind_is_abandoned(futures: Futures) -> None:
    futures.abandon(SAMPLE, kind="asample")  # unknown
    sample = start(futures, SAMPLE, kind="asample", group="s:sample:0")
    await asyncio.sleep(0)
    futures.abandon(SAMPLE, kind="forward_backward")
    await asyncio.sleep(0)
    assert (sample.answer, futures.num_pending("asample")) == (None, 1)
    futures.abandon(SAMPLE, kind="asample")
    assert sample.task is not None
    await asyncio.wait([sample.task], timeout=60)
    assert futures.num_pending("asample") == 0
    assert await futures.poll(SAMPLE, timeout_s=60) == failed(
        FailedPrecondition("the client has cancelled the request")
    )
    futures.abandon(SAMPLE, kind="asample")  # over


async def test_closing_ends_all_work_without_an_answer(futures: Futures) -> None:
    both = [start(futures, f"{MODEL}:{seq_id}") for seq_id in (1, 2)]
    await asyncio.sleep(0)
    await futures.close()
    assert [pending.task is not None and pending.task.cancelled() for pending in both] == [True, True]
    assert futures.pending(f"{MODEL}:1") is None
    with pytest.raises(Gone):
        await futures.poll(f"{MODEL}:1", timeout_s=0)
