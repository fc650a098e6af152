"""The journal in PostgreSQL: who may write, outages, and tables that trainers share."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from tests.support.postgres import Postgres, running
from tests.unit.trainer_service.journals import MODEL, Journals, batch, created, done, executed, requests
from tinsmith.errors import ModelNotFound, NotReady, ServiceError
from tinsmith.rpc.postgres import check_url, described
from trainer_service.durability import journal_writer
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_database import Superseded, Unstorable
from trainer_service.durability.journal_postgres import PostgresDatabase
from trainer_service.durability.records import Body, EntryState

NEVER_S = 3600.0


@asynccontextmanager
async def opened(
    journals: Journals, *, trainer: str = "a", lease_s: float = 15.0, renew_s: float = 3.0
) -> AsyncIterator[Journal]:
    def start() -> Journal:
        return journals.journal(journals.database(trainer=trainer, lease_s=lease_s, renew_s=renew_s))

    journal = await asyncio.to_thread(start)
    try:
        yield journal
    finally:
        await asyncio.to_thread(journal.close)


async def sql(journals: Journals, statement: str, *values: Any) -> Any:
    connection = await asyncpg.connect(journals.url)
    try:
        return await connection.fetchval(statement, *values)
    finally:
        await connection.close()


async def test_of_two_trainers_on_one_journal_the_older_can_do_nothing_more(in_postgres: Journals) -> None:
    """The older one does not renew its row, as if it were stopped, but its connection is open."""
    async with opened(in_postgres, renew_s=NEVER_S) as older:
        await executed(older, range(2))
        await older.append(MODEL, 2, batch(2))
        await older.append(MODEL, 3, batch(3))
        async with opened(in_postgres, lease_s=0.1) as newer:
            attempts = await asyncio.gather(
                older.append(MODEL, 4, batch(4)),
                older.append("another", 0, created()),
                older.finish(MODEL, 2, done(2.0)),
                older.add_snapshot(MODEL, 1, num_bytes=1),
                older.lose(MODEL, "it is late"),
                older.delete_model(MODEL),
                older.check_ours(),
                older.find(MODEL, 1),
                return_exceptions=True,
            )
            assert {type(one) for one in attempts} == {Superseded}
            assert "generation 2 of trainer 'a', process" in str(attempts[0])
            assert "from this process, which is generation 1" in str(attempts[0])
            assert older.writer.superseded.result() is not None
            with pytest.raises(Superseded):
                await older.append(MODEL, 4, batch(4))
            states = [entry.state for entry in await newer.history(MODEL)]
            assert states == [EntryState.DONE, EntryState.DONE, EntryState.ACCEPTED, EntryState.ACCEPTED]
            assert await newer.model_ids() == {MODEL}
            await newer.finish(MODEL, 2, done(3.0))
            assert not newer.writer.superseded.done()


async def test_an_idle_trainer_notices_that_another_one_has_taken_over(in_postgres: Journals) -> None:
    async with opened(in_postgres, renew_s=0.05) as older:
        await sql(in_postgres, "UPDATE tinsmith_journal.trainers SET generation = generation + 1")
        await asyncio.wait_for(asyncio.wrap_future(older.writer.superseded), 30)


async def test_a_transaction_in_work_does_not_keep_a_newer_trainer_out(in_postgres: Journals) -> None:
    """A process that is stopped within a transaction holds the lock on the trainer's row."""
    async with opened(in_postgres, renew_s=NEVER_S) as older:
        begun, goes_on = threading.Event(), threading.Event()

        def stopped(_: object) -> None:
            begun.set()
            goes_on.wait(60)

        job = asyncio.create_task(older.writer.submit(stopped))
        append = asyncio.create_task(older.append(MODEL, 0, created()))
        await asyncio.to_thread(begun.wait)
        async with opened(in_postgres, lease_s=0.1) as newer:
            goes_on.set()
            for task in (job, append):
                with pytest.raises(Superseded):
                    await task
            assert await newer.model_ids() == set()


async def test_a_trainer_that_is_alive_is_not_taken_over_and_the_message_says_what_to_do(
    in_postgres: Journals,
) -> None:
    async with opened(in_postgres, renew_s=0.05) as journal:
        with pytest.raises(SystemExit, match=r"trainer 'a' is at work \(process .*TRAINER_JOURNAL_NAME"):
            await asyncio.to_thread(in_postgres.database)
        await journal.append(MODEL, 0, created())


async def test_after_the_end_of_a_trainer_the_next_one_waits_for_nothing_and_keeps_its_id(
    in_postgres: Journals,
) -> None:
    def identity() -> tuple[int, str, str]:
        database = in_postgres.database(lease_s=NEVER_S)
        database.close()
        return database.generation, database.trainer_id, database.journal_id

    first = await asyncio.to_thread(identity)
    second = await asyncio.to_thread(identity)
    assert (first[0], second[0]) == (1, 2)
    assert first[1:] == second[1:]
    assert [len(one) for one in first[1:]] == [32, 32]


async def test_trainers_that_share_a_database_do_not_see_each_other(in_postgres: Journals) -> None:
    async with opened(in_postgres) as one, opened(in_postgres, trainer="b") as other:
        await executed(one, range(3))
        await other.append("s:train:7", 0, created())
        assert [model.model_id for model in await one.live_models()] == [MODEL]
        assert [model.model_id for model in await other.summaries()] == ["s:train:7"]
        assert await other.find(MODEL, 1) is None
        assert await one.model_ids() == await other.model_ids() == {MODEL, "s:train:7"}, "whose snapshots stay"
        with pytest.raises(ModelNotFound):
            await other.append(MODEL, 3, batch(3))
        with pytest.raises(ServiceError, match="exists already"):
            await other.append(MODEL, 0, created())
        await other.delete_model(MODEL)
        assert len(await requests(one)) == 3
        await sql(
            in_postgres,
            "UPDATE tinsmith_journal.models SET trainer = (SELECT number FROM tinsmith_journal.trainers "
            "WHERE name = 'b')",
        )
        assert len(await requests(other)) == 3, "a run can be given to another trainer"
        with pytest.raises(ModelNotFound):
            await one.append(MODEL, 3, batch(3))


@pytest.fixture(scope="module")
def mortal() -> Any:
    """A cluster that tests stop and start."""
    with running() as cluster:
        yield cluster


async def test_appends_wait_for_the_end_of_an_outage_and_nothing_is_lost(
    mortal: Postgres, in_postgres: Journals
) -> None:
    journals = Journals(in_postgres.folder, mortal.new_database().replace("+asyncpg", ""))
    async with opened(journals) as journal:
        await executed(journal, range(3))
        await journal.append(MODEL, 3, batch(3))
        await asyncio.to_thread(mortal.stop)
        calls = [
            asyncio.create_task(journal.append(MODEL, 4, batch(4))),
            asyncio.create_task(journal.finish(MODEL, 3, done(3.0))),
        ]
        await asyncio.sleep(1.0)
        assert not any(call.done() for call in calls)
        await asyncio.to_thread(mortal.start)
        await asyncio.gather(*calls)
        assert [seq_id for seq_id, _ in await requests(journal)] == list(range(5))
        assert [entry.state for entry in await journal.history(MODEL)][3:] == [EntryState.DONE, EntryState.ACCEPTED]


async def test_in_a_long_outage_callers_are_told_to_try_again_and_reads_for_a_restart_wait(
    mortal: Postgres, in_postgres: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "_OUTAGE_PATIENCE_S", 0.0)
    journals = Journals(in_postgres.folder, mortal.new_database().replace("+asyncpg", ""))
    async with opened(journals) as journal:
        await executed(journal, range(2))
        await asyncio.to_thread(mortal.stop)
        for call in (journal.append(MODEL, 2, batch(2)), journal.find(MODEL, 1), journal.check_ours()):
            with pytest.raises(NotReady, match=r"the journal postgresql://.* cannot be reached: .*; try again"):
                await call
        reading = asyncio.create_task(journal.history(MODEL))
        await asyncio.sleep(1.0)
        assert not reading.done()
        await asyncio.to_thread(mortal.start)
        assert len(await reading) == 2
        await journal.append(MODEL, 2, batch(2))


class _CutAtCommit:
    """Loses the connection right after the commit has taken place, once, so that its outcome is unknown."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self.times = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def commit(self) -> None:
        self._database.commit()
        if self.times:
            self.times -= 1
            self._database._drop()
            raise ConnectionResetError("connection was closed in the middle of operation")


async def test_a_commit_whose_outcome_is_unknown_takes_place_once(in_postgres: Journals) -> None:
    async with opened(in_postgres) as journal:
        await executed(journal, range(3))
        await journal.append(MODEL, 3, batch(3))
        cut: Any = _CutAtCommit(journal.writer.database)  # type: ignore[arg-type]
        journal.writer.database = cut
        body = batch(4)
        await journal.append(MODEL, 4, body)
        cut.times = 1
        await journal.finish(MODEL, 3, done(3.0))
        cut.times = 1
        assert await journal.add_snapshot(MODEL, 1, num_bytes=1) == -1
        cut.times = 1
        assert await journal.add_snapshot(MODEL, 2, num_bytes=1) == 1
        cut.times = 1
        await journal.append("another", 0, created())
        assert await requests(journal) == [(2, batch(2)), (3, batch(3)), (4, body)]
        found = await journal.find(MODEL, 3)
        assert found is not None
        assert found.outcome == done(3.0)
        held = sum(model.request_bytes + model.result_bytes for model in await journal.summaries())
        assert journal.bound.sizes.total == held
        assert journal.bound.sizes.pending == len(body.compressed) + len(created().compressed)


async def test_a_request_that_nobody_was_told_of_gives_way_to_the_next_one(
    in_postgres: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of an append in an outage is told to try again, and may send another request of that number."""
    monkeypatch.setattr(journal_writer, "_OUTAGE_PATIENCE_S", 0.0)
    async with opened(in_postgres) as journal:
        await executed(journal, range(2))
        cut: Any = _CutAtCommit(journal.writer.database)  # type: ignore[arg-type]
        journal.writer.database = cut
        with pytest.raises(NotReady):
            await journal.append(MODEL, 2, batch(2))
        await journal.append(MODEL, 2, batch(20))
        assert await requests(journal) == [(0, created()), (1, batch(1)), (2, batch(20))]
        await journal.finish(MODEL, 2, done(2.0))
        with pytest.raises(ServiceError, match=f"{MODEL}, seq_id 2, is in the journal already"):
            await journal.append(MODEL, 2, batch(2))


async def test_a_server_without_fsync_and_one_without_synchronous_commit(
    in_postgres: Journals, caplog: pytest.LogCaptureFixture
) -> None:
    name = in_postgres.url.rpartition("/")[2]
    await sql(in_postgres, f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    with caplog.at_level(logging.WARNING):
        async with opened(in_postgres) as journal:
            setting = await journal.writer.submit(
                lambda database: database.execute("SELECT current_setting('synchronous_commit')").fetchone()
            )
    assert setting == ("on",)
    assert any("fsync = off, so a power cut may lose" in record.message for record in caplog.records)


async def test_what_postgresql_cannot_hold_is_told_from_an_outage(
    in_postgres: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(in_postgres) as journal:
        with pytest.raises(Unstorable, match="cannot hold it"):
            await journal.append("a\0b", 0, created())
        monkeypatch.setattr("trainer_service.durability.journal_postgres._MOST_BYTES", 100)
        with pytest.raises(Unstorable, match="at most 100 bytes in a row"):
            await journal.append(MODEL, 0, Body("create_model", b"", b"x" * 200))
        await journal.append(MODEL, 0, created())


async def test_a_journal_of_another_format_is_refused(in_postgres: Journals) -> None:
    async with opened(in_postgres):
        pass
    await sql(in_postgres, "UPDATE tinsmith_journal.about SET format = 99")
    with pytest.raises(SystemExit, match="has format 99; this trainer reads format 1"):
        await asyncio.to_thread(in_postgres.database)


async def test_a_database_that_cannot_be_reached_is_named_without_its_password() -> None:
    with pytest.raises(SystemExit, match=r"cannot open the journal postgresql://127.0.0.1:1/none: .*") as refused:
        await asyncio.to_thread(PostgresDatabase, "postgresql://me:secret@127.0.0.1:1/none", "a")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["sqlite:///a", "postgresql+asyncpg://h/n", "postgresql://h", "postgresql://h/", "x"])
def test_a_url_that_is_none_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r"^is not of the form postgresql://USER:PASSWORD@HOST/NAME$"):
        check_url(url)


def test_a_url_is_shown_without_user_and_password() -> None:
    assert described("postgresql://me:a@b@host:5432/name?sslmode=require") == "postgresql://host:5432/name"
