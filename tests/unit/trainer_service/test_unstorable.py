"""Answers that the journal does not take: for now, or for ever."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import EncodeError
from prometheus_client import CollectorRegistry

from tests.unit.trainer_service.scheduling import Bench, MakeBench, fake_batch
from tinsmith.errors import OutOfCapacity, ResultNotFound, ServiceError
from tinsmith.v1 import trainer_pb2 as pb
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_database import Database, Unstorable
from trainer_service.durability.journal_file import JournalFile
from trainer_service.durability.records import Body, EntryState
from trainer_service.metrics import Metrics
from trainer_service.operation import Operation
from trainer_service.scheduling import scheduler as scheduler_module
from trainer_service.scheduling.packing import Lanes


async def test_an_answer_that_is_too_large_for_the_journal_is_given_once_and_not_tried_again(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench()
    await bench.create("a")
    database = bench.journal.writer.database
    assert isinstance(database, JournalFile)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4000)
    operation = await bench.batch("a", 1, "x" * 5000)
    assert (await operation.wait()).forward_backward.metrics == {"x" * 5000: 1.0}
    async with asyncio.timeout(5):
        await operation.stored.wait()
    assert [record.message for record in caplog.records if "its answer is not kept" in record.message]
    found = await bench.journal.find("a", 1)
    assert found is not None
    assert (found.state, found.outcome) == (EntryState.DONE, None)
    with pytest.raises(ResultNotFound, match="seq_id 1 has expired, or was too large to be kept"):
        await (await bench.scheduler.find("a", 1)).wait()
    await (await bench.step("a", 2)).wait()


@pytest.mark.parametrize("error", [OverflowError("BLOB longer than INT_MAX bytes"), EncodeError("above 2 GB")])
async def test_data_that_no_disk_would_take_is_told_from_a_disk_that_does_not_take_it_now(
    bench: Bench, error: Exception
) -> None:
    def run(_: Database) -> None:
        raise error

    with pytest.raises(Unstorable, match=f"cannot hold it: {error}"):
        await bench.journal.writer.submit(run)


async def test_an_answer_waits_for_a_full_disk_and_ever_longer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.create("a")
    finish, pauses = bench.journal.finish, []

    async def full(*arguments: Any, **options: Any) -> None:
        if len(pauses) < 8:
            raise OutOfCapacity("the disk is full")
        await finish(*arguments, **options)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(bench.journal, "finish", full)
    monkeypatch.setattr(scheduler_module.asyncio, "sleep", sleep)
    operation = await bench.step("a", 1)
    answer = await operation.wait()
    await operation.stored.wait()
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert await (await bench.scheduler.find("a", 1)).wait() == answer


async def test_a_transaction_that_runs_again_counts_its_bytes_once(tmp_path: Path) -> None:
    journal = Journal(
        tmp_path / "journal", max_bytes=1 << 20, result_retention_s=60, metrics=Metrics(CollectorRegistry())
    )
    body = Body.pack("create_model", pb.CreateModelRequest(model_id="a"))
    free = threading.Event()
    blocked = asyncio.create_task(journal.writer.submit(lambda _: free.wait(10)))  # what comes now shares the next one
    append = asyncio.create_task(journal.append("a", 0, body))
    failing = asyncio.create_task(journal.writer.submit(lambda database: database.execute("no statement")))
    await asyncio.sleep(0.05)
    free.set()
    await blocked
    with pytest.raises(ServiceError, match="syntax error"):
        await failing
    await append
    assert journal.appended_bytes("a") == len(body.compressed)
    await journal.delete_model("a")
    assert journal.appended_bytes("a") == 0
    await asyncio.to_thread(journal.close)


async def test_status_and_scrapes_look_at_no_datum(bench: Bench) -> None:
    class Untouchable(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError

        def __len__(self) -> int:
            return 3

    loop = asyncio.get_running_loop()
    lanes = Lanes()
    batch = fake_batch("a1", model_id="a", lengths=[10, 20, 30])
    operation = Operation("a", 1, "forward_backward", b"", loop.create_future(), loop.create_future(), work=batch)
    lanes.put(operation)
    assert lanes.next(10) == [(operation, range(1))]
    batch.costs = batch.charges = batch.datums = Untouchable()
    assert lanes.waiting() == {"a": [operation]}
    assert lanes.next_of_each() == [operation]
    assert operation.num_waiting_tokens == 50
