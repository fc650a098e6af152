"""`tinsmith keys`, on a database of its own."""

from __future__ import annotations

import json
import sqlite3
import stat
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tinsmith_cli import main
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.up import _keys


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATEWAY_DATABASE_URL", "GATEWAY_API_KEYS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs one action; its output."""

    def run(*argv: str, status: int = 0) -> str:
        assert main(["keys", *argv, "--state-dir", str(tmp_path)]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


def test_a_key_is_shown_once_and_stored_as_a_hash(keys: Any, tmp_path: Path) -> None:
    key = keys("create", "--owner", "ada", "--name", "laptop", "--expires", "30d").strip()
    assert key.startswith("tml-")
    assert len(key) >= 4 + 43  # 256 bits in base64
    database = tmp_path / "gateway" / "gateway.db"
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    rows = [str(row) for table in ("api_keys", "audit_events") for row in _rows(database, table)]
    assert not any(key in row or key[4:] in row for row in rows)
    assert "ada" in rows[0]
    assert any("key_create" in row for row in rows)
    listed = json.loads(keys("list", "--json"))["keys"]
    assert [(one["owner"], one["name"], one["state"], one["tokens"]) for one in listed] == [
        ("ada", "laptop", "valid", 0)
    ]
    assert key not in keys("list")
    expires = time.strptime(listed[0]["expires"], "%Y-%m-%dT%H:%M:%SZ")
    assert time.mktime(expires) - time.mktime(time.gmtime()) == pytest.approx(30 * 86400, abs=60)


def _rows(database: Path, table: str) -> list[Any]:
    with sqlite3.connect(database) as connection:
        return connection.execute(f"SELECT * FROM {table}").fetchall()


def test_a_revoked_key_stays_in_the_list(keys: Any) -> None:
    first, second = (keys("create", "--owner", "ada") for _ in range(2))
    assert first != second
    listed = json.loads(keys("list", "--json"))["keys"]
    for _ in range(2):
        assert "is revoked" in keys("revoke", listed[0]["id"])
    states = {one["id"]: one["state"] for one in json.loads(keys("list", "--json"))["keys"]}
    assert states == {listed[0]["id"]: "revoked", listed[1]["id"]: "valid"}


def test_a_change_of_a_budget_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the output, which is the key alone."""

    def run(*argv: str) -> tuple[str, str]:
        assert main(["keys", *argv, "--state-dir", str(tmp_path)]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    assert "budget" not in run("create", "--owner", "ada")[1]
    out, err = run("create", "--owner", "ada", "--tokens-budget", "5M")
    assert out.startswith("tml-")
    assert len(out.splitlines()) == 1
    assert "the token budget of ada, for all keys of ada, was any number and is now 5000000\n" in err
    _, err = run("create", "--owner", "ada", "--tokens-budget", "0", "--storage-quota", "1k")
    assert "the token budget of ada, for all keys of ada, was 5000000 and is now 0\n" in err
    assert "the storage quota of ada, for all keys of ada, was any number and is now 1000\n" in err
    _, err = run("budget", "ada", "--storage", "none")
    assert err == "the storage quota of ada, for all keys of ada, was 1000 and is now any number\n"


def test_budgets_are_set_with_a_key_or_later(keys: Any) -> None:
    keys("create", "--owner", "ada", "--tokens-budget", "5M", "--storage-quota", "20G")
    assert keys("budget", "bob", "--restart").startswith("tokens  0 of any number\n")  # who has no key yet
    assert keys("budget", "ada") == "tokens  0 of 5000000\nstorage 0 of 20000000000, in bytes\n"
    assert keys("budget", "ada", "--tokens", "none", "--restart").startswith("tokens  0 of any number\n")
    owners = json.loads(keys("list", "--json"))["owners"]
    assert [(one["owner"], one["token_budget"], one["storage_quota"]) for one in owners] == [
        ("ada", None, 20 * 10**9),
        ("bob", None, None),
    ]


def test_a_database_of_a_newer_version_is_refused_with_a_message(keys: Any, tmp_path: Path) -> None:
    keys("create", "--owner", "ada")
    (file,) = tmp_path.rglob("gateway.db")
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("UPDATE alembic_version SET version_num = '9999'")
    said = keys("list", status=2)
    assert f"{file} cannot be used: a newer Tinsmith has changed its tables" in said
    assert "'9999'" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("create", "--owner", "../x"), "owner: '../x' is not"),
        (("create", "--owner", ""), "owner: '' is not"),
        (("revoke", "000000000000"), "there is no key with the id '000000000000'"),
        (("revoke", "%"), "there is no key with the id '%'"),
        (("revoke", ""), "there is no key with the id ''"),
        (("budget", "nobody"), "'nobody' has no key"),
        (("list", "--database-url", "nonsense"), "(GATEWAY_DATABASE_URL): is no SQLAlchemy URL"),
        (("list", "--database-url", "mssql+aioodbc://h/x"), "(GATEWAY_DATABASE_URL): needs the Python package aioodbc"),
        (("list", "--database-url", "sqlite:///x"), "(GATEWAY_DATABASE_URL): names no driver for asyncio"),
        (("list", "--database-url", "postgresql://h/x"), "(GATEWAY_DATABASE_URL): names no driver for asyncio"),
        (
            ("list", "--database-url", "postgresql+asyncpg://ada:x/none"),
            "(GATEWAY_DATABASE_URL): is no SQLAlchemy URL",
        ),
        (("create", "--owner", "x", "--database-url", "sqlite+aiosqlite:////proc/none/x.db"), "cannot be used"),
    ],
)
def test_what_cannot_be_done_is_said(keys: Any, argv: tuple[str, ...], message: str) -> None:
    keys("create", "--owner", "ada")
    assert message in keys(*argv, status=2)


@pytest.mark.parametrize(
    "argv", [("list",), ("revoke", "000000000000"), ("budget", "ada"), ("budget", "ada", "--tokens", "5")], ids=str
)
def test_a_folder_without_a_database_is_not_made_one(keys: Any, tmp_path: Path, argv: tuple[str, ...]) -> None:
    said = keys(*argv, status=2)
    assert f"there is no database {tmp_path / 'gateway' / 'gateway.db'}; `tinsmith up` and" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argv",
    [("--expires", "30"), ("--expires", "0d"), ("--tokens-budget", "5x"), ("--requests-per-minute", "0")],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_refused(keys: Any, argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        keys("create", "--owner", "ada", *argv)
    assert ended.value.code == 2


def test_up_asks_for_a_key_once_there_is_one(keys: Any, tmp_path: Path) -> None:
    assert _keys("127.0.0.1", [], state_dir=tmp_path) is None
    with pytest.raises(UsageError, match="tinsmith keys create"):
        _keys("0.0.0.0", [], state_dir=tmp_path)
    keys("create", "--owner", "ada")
    for host in ("127.0.0.1", "0.0.0.0"):
        found = _keys(host, [], state_dir=tmp_path)
        assert found is not None
        assert found.api_keys == "[]"  # the trainer and the samplers take the service key alone
        assert len(found.service_key) >= 32
