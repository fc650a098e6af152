"""`tinsmith journal` on real journals: of a stopped trainer, and over gRPC."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.postgres import Postgres, postgres  # noqa: F401 - a fixture
from tinsmith.errors import InvalidRequest
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith_cli import main
from trainer_service.durability.journal import Journal
from trainer_service.durability.journal_postgres import PostgresDatabase
from trainer_service.durability.records import Body
from trainer_service.metrics import Metrics

LIVE, LOST = "s:train:0", "s:train:1"


def done() -> pb.WaitResultResponse:
    return pb.WaitResultResponse(optim_step=pb.OptimStepResponse(metrics={"norm:mean": 1.0}))


async def filled(folder: Path) -> Journal:
    metrics = Metrics(CollectorRegistry())
    return await fill(Journal(folder / "journal.sqlite", max_bytes=1 << 20, result_retention_s=0.0, metrics=metrics))


async def fill(journal: Journal) -> Journal:
    journal.bound._next_prune = float("inf")
    for model_id in (LIVE, LOST):
        await journal.append(model_id, 0, Body.pack("create_model", pb.CreateModelRequest(model_id=model_id)))
        await journal.finish(model_id, 0, done())
    for seq_id in (1, 2, 3):
        await journal.append(LIVE, seq_id, Body.pack("optim_step", pb.OptimStepRequest(seq_id=seq_id)))
    await journal.finish(LIVE, 1, done())
    await journal.finish(LIVE, 2, InvalidRequest("no"))
    assert await journal.add_snapshot(LIVE, 2, num_bytes=123) == -1
    await journal.lose(LOST, "its snapshots are damaged")
    return journal


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The state folder of `tinsmith up`."""

    async def fill() -> None:
        await asyncio.to_thread((await filled(tmp_path / "trainers" / "tiny")).close)

    asyncio.run(fill())
    return tmp_path


def journal(action: str, folder: Path, *flags: str) -> int:
    return main(["journal", action, "--state-dir", str(folder), *flags])


def test_show_says_what_each_model_would_come_back_from(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert journal("show", stopped) == 0
    where, live, lost, why = capsys.readouterr().out.splitlines()
    assert where.startswith(f"{stopped}/trainers/tiny/journal.sqlite: 2 models, ")
    assert live.startswith(f"{LIVE}  live, snapshot after seq_id 2, ")
    assert "123 B; 1 accepted, 2 done, 1 failed; requests" in live
    assert lost.startswith(f"{LOST}  lost, no snapshot, all requests are kept; ")
    assert why == "    its snapshots are damaged"


def test_prune_says_what_would_go_and_then_deletes_that(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert journal("prune", stopped, "--expired-after", "0") == 0
    dry = capsys.readouterr().out.splitlines()
    assert ": would delete " in dry[0]
    assert dry[0].endswith(": 3 expired results, 3 requests behind snapshots or of ended models, 1 ended models")
    warning = "    without these requests, a model can only be restored from its newest snapshot, not from an older one"
    assert dry[1:] == [warning, f"    {LOST}", "nothing was changed; --yes does it"]
    assert journal("prune", stopped, "--expired-after", "0", "--yes") == 0
    assert capsys.readouterr().out.splitlines()[0] == dry[0].replace("would delete", "deleted")
    journal("show", stopped)
    _, live = capsys.readouterr().out.splitlines()
    assert "1 accepted, 0 done, 0 failed" in live
    assert journal("prune", stopped, "--yes") == 0
    assert "deleted 0 B" in capsys.readouterr().out


def test_why_a_model_was_lost_is_kept_until_it_expires_or_the_model_is_named(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert journal("prune", stopped, "--yes") == 0
    assert ", 0 ended models" in capsys.readouterr().out
    journal("show", stopped)
    assert "its snapshots are damaged" in capsys.readouterr().out
    assert journal("prune", stopped, "--model", LOST, "--yes") == 0
    journal("show", stopped)
    assert LOST not in capsys.readouterr().out.splitlines()[-1]


def test_a_model_that_ends_the_trainer_can_be_removed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert journal("prune", stopped, "--model", LIVE) == 0
    assert f"would delete {LIVE}" in capsys.readouterr().out
    assert journal("prune", stopped, "--model", LIVE, "--yes") == 0
    assert f": deleted {LIVE}" in capsys.readouterr().out
    assert journal("prune", stopped, "--model", LIVE) == 2
    assert f"has a model {LIVE!r}" in capsys.readouterr().err
    assert main(["journal", "prune", "--trainer", "127.0.0.1:1", "--model", LIVE]) == 2
    assert "stop the trainer first" in capsys.readouterr().err


def test_a_folder_without_a_journal_and_an_unreachable_trainer_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert journal("show", tmp_path) == 2
    assert "holds no journal.sqlite" in capsys.readouterr().err
    assert main(["journal", "show", "--trainer", "127.0.0.1:1"]) == 2
    assert "the trainer at 127.0.0.1:1: " in capsys.readouterr().err


async def test_the_journal_of_a_running_trainer_is_locked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = await filled(tmp_path)
    assert await asyncio.to_thread(journal, "show", tmp_path) == 2
    assert "--trainer ADDRESS" in capsys.readouterr().err
    await asyncio.to_thread(running.close)


@pytest.mark.parametrize("age", ["nan", "-5", "inf"])
def test_an_age_that_is_none_is_refused(age: str, stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        journal("prune", stopped, "--expired-after", age)
    assert ended.value.code == 2
    assert f"--expired-after: {age} is not an age in seconds" in capsys.readouterr().err


@pytest.fixture
def url(postgres: Postgres, tmp_path: Path) -> str:  # noqa: F811
    """A database with the journal of the stopped trainer "tiny"."""
    url = postgres.new_database().replace("+asyncpg", "")
    database = PostgresDatabase(url, "tiny")
    metrics = Metrics(CollectorRegistry())
    journal = Journal((database, tmp_path), max_bytes=1 << 20, result_retention_s=0.0, metrics=metrics)
    asyncio.run(fill(journal))
    journal.close()
    return url


def test_journals_in_postgresql_are_shown_and_pruned_alike(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"postgresql://{url.rpartition('@')[2]}, trainer tiny: "
    assert main(["journal", "show", "--journal", url]) == 0
    first, live, lost, _ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{where}2 models, ")
    assert live.startswith(f"{LIVE}  live, snapshot after seq_id 2, ")
    assert lost.startswith(f"{LOST}  lost, ")
    monkeypatch.setenv("TRAINER_JOURNAL", url)
    assert main(["journal", "prune", "--journal", "--name", "tiny", "--expired-after", "0", "--yes"]) == 0
    assert f"{where}deleted " in capsys.readouterr().out
    assert main(["journal", "prune", "--journal", "--model", LIVE, "--yes"]) == 0
    assert f": deleted {LIVE}" in capsys.readouterr().out
    assert main(["journal", "show", "--journal"]) == 0
    assert "0 models" in capsys.readouterr().out


def test_a_journal_in_postgresql_that_cannot_be_shown_says_why(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRAINER_JOURNAL", raising=False)
    refusals = {
        ("--journal",): "--journal: no URL is given, and TRAINER_JOURNAL is not set",
        ("--journal", "sqlite:///a"): "--journal: the URL is not of the form postgresql://",
        ("--journal", url, "--name", "large"): "--name: no trainer 'large' is in the database; it has ['tiny']",
        ("--name", "tiny"): "--name: it names a trainer in a PostgreSQL database, so --journal must be given",
        ("--journal", "postgresql://me:secret@127.0.0.1:1/none"): "cannot open the journal postgresql://127.0.0.1:1/",
    }
    for flags, message in refusals.items():
        assert main(["journal", "show", *flags]) == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert "secret" not in shown


def test_the_journal_of_a_trainer_at_work_in_postgresql_is_not_touched(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    database = PostgresDatabase(url, "tiny", renew_s=0.05)
    metrics = Metrics(CollectorRegistry())
    running = Journal((database, Path("/tmp")), max_bytes=1 << 20, result_retention_s=0.0, metrics=metrics)
    try:
        assert main(["journal", "show", "--journal", url]) == 2
        assert "trainer 'tiny' is at work" in capsys.readouterr().err
    finally:
        running.close()
