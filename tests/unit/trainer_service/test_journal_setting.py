"""The settings journal and journal_name, and what they do to a trainer's folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr, ValidationError

from tests.unit.trainer_service.journals import MODEL, Journals, created
from trainer_service.assembly import open_journal
from trainer_service.config import TrainerConfig
from trainer_service.metrics import Metrics


def config(journals: Journals, folder: Path, *, name: str = "") -> TrainerConfig:
    return TrainerConfig(base_model="m", journal=SecretStr(journals.url), journal_name=name, state_dir=folder)


@pytest.mark.parametrize("url", ["mysql://h/n", "postgresql+asyncpg://h/n", "/a/file"])
def test_a_journal_that_is_no_url_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ValidationError, match="is not of the form postgresql://USER:PASSWORD@HOST/NAME") as refused:
        TrainerConfig(base_model="m", journal=SecretStr(url))
    (problem,) = refused.value.errors(include_input=False)
    assert problem["loc"] == ("journal",)
    assert url not in problem["msg"]


def test_the_password_is_not_in_the_logged_settings() -> None:
    shown = TrainerConfig(base_model="m", journal=SecretStr("postgresql://me:secret@h/n")).model_dump_json()
    assert "secret" not in shown.replace("SecretStr", "")


def test_a_trainer_is_named_after_its_base_model_unless_it_has_a_name(in_postgres: Journals) -> None:
    assert TrainerConfig(base_model="m").name_in_journal == "m"
    assert TrainerConfig(base_model="m", model_names=["a", "b"]).name_in_journal == "a"
    assert config(in_postgres, in_postgres.folder, name="second").name_in_journal == "second"


async def test_a_trainer_that_lost_its_folder_finds_its_runs_and_its_id(in_postgres: Journals) -> None:
    ids: list[str] = []
    for folder in (in_postgres.folder / "first", in_postgres.folder / "second"):
        journal = await asyncio.to_thread(open_journal, config(in_postgres, folder), Metrics(CollectorRegistry()))
        if not ids:
            await journal.append(MODEL, 0, created())
        assert [model.model_id for model in await journal.live_models()] == [MODEL]
        assert journal.folder == folder
        await asyncio.to_thread(journal.close)
        ids.append((folder / "writer_id").read_text())
    assert ids[0] == ids[1]


async def test_a_file_with_live_runs_is_not_left_behind(in_postgres: Journals, tmp_path: Path) -> None:
    file = Journals(tmp_path, "")
    async with file.opened() as journal:
        await journal.append(MODEL, 0, created())
    with pytest.raises(SystemExit, match=r"TRAINER_JOURNAL is set, and the journal .*journal.sqlite has 1 live runs"):
        await asyncio.to_thread(open_journal, config(in_postgres, tmp_path), Metrics(CollectorRegistry()))
    async with file.opened() as journal:
        await journal.delete_model(MODEL)
    journal = await asyncio.to_thread(open_journal, config(in_postgres, tmp_path), Metrics(CollectorRegistry()))
    await asyncio.to_thread(journal.close)
