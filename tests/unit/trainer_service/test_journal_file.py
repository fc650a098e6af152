"""The journal in a SQLite file: its lock, its files, and damage."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.unit.trainer_service.journals import MODEL, batch, created, done, executed, requests
from tinsmith.errors import DataCorrupted, OutOfCapacity, ServiceError
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_database import Database
from trainer_service.durability.records import EntryState, Record
from trainer_service.metrics import Metrics


@asynccontextmanager
async def opened(folder: Path, **settings: float) -> AsyncIterator[Journal]:
    options = {"max_bytes": 1 << 20, "result_retention_s": 3600.0, **settings}
    journal = Journal(folder / "journal.sqlite", metrics=Metrics(CollectorRegistry()), **options)  # type: ignore[arg-type]
    try:
        yield journal
    finally:
        await asyncio.to_thread(journal.close)


def test_states_keep_their_numbers_in_the_file() -> None:
    assert {state.name: state.value for state in EntryState} == {"ACCEPTED": 0, "DONE": 1, "FAILED": 2}


async def test_a_second_trainer_on_the_same_journal_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        with pytest.raises(SystemExit, match="another trainer"):
            Journal(
                tmp_path / "journal.sqlite", max_bytes=1, result_retention_s=1, metrics=Metrics(CollectorRegistry())
            )


async def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    """It holds what runs are trained on."""
    async with opened(tmp_path) as journal:
        await journal.append(MODEL, 0, created())
        modes = {file.name: file.stat().st_mode & 0o777 for file in os.scandir(tmp_path)}
    assert len(modes) > 1
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.parametrize("num_bytes", [1, 24, 2048, 4096])
async def test_a_power_cut_that_tears_off_the_end_takes_nothing_that_was_acknowledged(
    tmp_path: Path, num_bytes: int
) -> None:
    async with opened(tmp_path / "before") as journal:
        await journal.append(MODEL, 0, created())
        for seq_id in range(1, 20):
            await journal.append(MODEL, seq_id, batch(seq_id))
            after = tmp_path / f"after-{seq_id}"
            shutil.copytree(tmp_path / "before", after)
            with (after / "journal.sqlite-wal").open("r+b") as log:
                log.truncate(log.seek(0, os.SEEK_END) - num_bytes)
            async with opened(after) as copy:
                assert [found for found, _ in await requests(copy)] == list(range(seq_id + 1))


async def test_a_torn_write_behind_the_last_transaction_is_as_if_it_had_never_begun(tmp_path: Path) -> None:
    async with opened(tmp_path / "before") as journal:
        await journal.append(MODEL, 0, created())
        await journal.append(MODEL, 1, batch(1))
        shutil.copytree(tmp_path / "before", tmp_path / "after")
    with (tmp_path / "after" / "journal.sqlite-wal").open("r+b") as log:
        frame = log.read(32 + 24 + 4096)[32:]
        log.seek(0, os.SEEK_END)
        log.write(frame[:3000])
    async with opened(tmp_path / "after") as journal:
        assert [found for found, _ in await requests(journal)] == [0, 1]
        await journal.append(MODEL, 2, batch(2))
        assert [found for found, _ in await requests(journal)] == [0, 1, 2]


@pytest.mark.parametrize("number", [1, 2, 99])
async def test_a_journal_of_another_format_is_refused(tmp_path: Path, number: int) -> None:
    database = sqlite3.connect(tmp_path / "journal.sqlite")
    database.execute(f"PRAGMA user_version = {number}")
    database.close()
    with pytest.raises(SystemExit, match=f"has format {number}; this trainer reads format 3"):
        async with opened(tmp_path):
            pass


async def test_a_damaged_journal_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, range(40), length=512)
    path = tmp_path / "journal.sqlite"
    content = path.read_bytes()
    path.write_bytes(content[: 4096 * 3])
    with pytest.raises(SystemExit, match=rf"{path} is damaged: .*move the folder away"):
        async with opened(tmp_path):
            pass


@pytest.mark.parametrize(
    ("name", "changed", "why"),
    [
        (b"request BLOB", b"requesu BLOB", "there is no column operations.request"),
        (b"INDEX expiring", b"INDEY expiring", "malformed database schema"),
        (b"tableoperationsoperations", b"table\xffperations\xffperations", "is damaged"),
    ],
    ids=["a column", "a statement", "no UTF-8"],
)
async def test_a_damaged_schema_is_refused_with_what_to_do(
    tmp_path: Path, name: bytes, changed: bytes, why: str
) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, range(3))
    path = tmp_path / "journal.sqlite"
    content = path.read_bytes()
    assert content.count(name) == 1
    path.write_bytes(content.replace(name, changed))
    with pytest.raises(SystemExit, match=rf"{path} is damaged: .*move the folder away") as refused:
        async with opened(tmp_path):
            pass
    assert why in str(refused.value)


async def test_an_index_that_has_lost_a_row_costs_one_model_and_says_what_to_do(tmp_path: Path) -> None:
    async with opened(tmp_path) as journal:
        await executed(journal, range(3))
        await journal.append("another", 0, created())
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as database:
        (root,) = database.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_operations_1'"
        ).fetchone()
        (page_size,) = database.execute("PRAGMA page_size").fetchone()
    database.close()
    content = bytearray(path.read_bytes())
    page = slice((root - 1) * page_size, root * page_size)
    content[page] = content[page].replace(MODEL.encode(), b"t:train:0")
    path.write_bytes(content)
    async with opened(tmp_path) as journal:
        with pytest.raises(DataCorrupted, match=rf"request of {MODEL}, seq_id 1, in the journal {path} is damaged"):
            await journal.body(MODEL, 1)
        assert await journal.body("another", 0) == created()
        with pytest.raises(ServiceError, match=rf"{path} is damaged: .*malformed.*Put a backup") as failed:
            await journal.writer.submit(lambda connection: connection.execute("DELETE FROM operations WHERE seq_id"))
        assert type(failed.value) is ServiceError, "a client that tries again would do so for ever"
        await journal.append("another", 1, batch(1))


class _FailingRollbacks:
    """A database whose first rollbacks fail."""

    def __init__(self, database: Database, *, times: int) -> None:
        self._database = database
        self._times = times

    def __getattr__(self, name: str) -> object:
        return getattr(self._database, name)

    def begin(self) -> None:
        if self._database.in_transaction:  # type: ignore[attr-defined]
            self.rollback()
        self._database.begin()

    def rollback(self) -> None:
        if self._times:
            self._times -= 1
            raise sqlite3.OperationalError("disk I/O error")
        self._database.rollback()


async def test_a_rollback_that_fails_is_made_up_for_before_the_next_transaction(tmp_path: Path) -> None:
    def fail(database: Database) -> None:
        database.execute("DELETE FROM models")
        raise sqlite3.OperationalError("disk I/O error")

    async with opened(tmp_path) as journal:
        await executed(journal, range(2))
        journal.writer.database = _FailingRollbacks(journal.writer.database, times=3)  # type: ignore[assignment]
        with pytest.raises(ServiceError, match="disk I/O error"):
            await asyncio.wait_for(journal.writer.submit(fail), 10)
        await asyncio.wait_for(journal.append(MODEL, 2, batch(2)), 10)
    async with opened(tmp_path) as journal:
        assert [seq_id for seq_id, _ in await requests(journal)] == [0, 1, 2]


async def test_a_torn_page_of_the_database_is_repaired_from_the_log(tmp_path: Path) -> None:
    async with opened(tmp_path / "before") as journal:
        await executed(journal, range(40), length=512)
        shutil.copytree(tmp_path / "before", tmp_path / "after")
    database = tmp_path / "after" / "journal.sqlite"
    with database.open("r+b") as file:
        file.truncate(max(0, file.seek(0, os.SEEK_END) - 1000))
    async with opened(tmp_path / "after") as journal:
        assert [seq_id for seq_id, _ in await requests(journal)] == list(range(40))


async def test_on_a_full_disk_appends_are_refused_and_what_is_there_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, max_bytes=1 << 30) as journal:
        await executed(journal, range(3))
        pages = await journal.writer.submit(lambda connection: connection.execute("PRAGMA page_count").fetchone()[0])
        await journal.writer.submit(
            lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()
        )
        appends = [journal.append(MODEL, seq_id, batch(seq_id, length=4096)) for seq_id in range(3, 9)]
        *refused, record = await asyncio.gather(*appends, journal.find(MODEL, 2), return_exceptions=True)
        assert {type(error) for error in refused} == {OutOfCapacity}
        assert "disk is full" in str(refused[0])
        assert isinstance(record, Record)
        assert record.outcome == done(2.0), "it shared a transaction with them"
        assert [(line.getMessage(), line.exc_info) for line in caplog.records] == [
            ("the journal cannot be written: database or disk is full", None)
        ]
        await journal.writer.submit(lambda connection: connection.execute("PRAGMA max_page_count = 1000000").fetchone())
        await executed(journal, range(3, 9), length=4096)
    async with opened(tmp_path) as journal:
        assert [seq_id for seq_id, _ in await requests(journal)] == list(range(9))
