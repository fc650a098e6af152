"""Journals whose base models are not served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith_cli.unserved_journals import with_live_runs
from trainer_service.durability import journal_file


def make_journal(folder: Path, *states: str) -> Path:
    folder.mkdir(parents=True)
    connection = journal_file.connect(folder / "journal.sqlite")
    for n, state in enumerate(states):
        connection.execute("INSERT INTO models (model_id, state, created_at) VALUES (?, ?, 0)", (f"m{n}", state))
    connection.close()
    return folder


@pytest.mark.filterwarnings("error")
def test_those_with_live_runs_are_found_and_left_as_they_are(tmp_path: Path) -> None:
    served = make_journal(tmp_path / "served", "live")
    moved = make_journal(tmp_path / "moved", "live", "live", "lost")
    make_journal(tmp_path / "ended", "lost", "failed")
    make_journal(tmp_path / "empty")
    damaged = tmp_path / "damaged" / "journal.sqlite"
    damaged.parent.mkdir()
    damaged.write_bytes(b"no database")
    before = (moved / "journal.sqlite").read_bytes()
    assert with_live_runs(tmp_path, served={served}) == {moved: 2}
    assert (moved / "journal.sqlite").read_bytes() == before
    assert with_live_runs(tmp_path / "none", served=()) == {}
