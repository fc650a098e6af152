"""A mistake in the configuration is one line that names the setting, not a traceback, and shows no secret."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("service", "environment", "expected"),
    [
        ("gateway", {"GATEWAY_API_KEYS": "tml-secret"}, "api_keys"),
        ("gateway", {"GATEWAY_PORT": "99999"}, "--port (GATEWAY_PORT)"),
        ("gateway", {"GATEWAY_DATABASE_URL": "tml-secret"}, "--database-url (GATEWAY_DATABASE_URL)"),
        ("gateway", {"GATEWAY_HOST": "0.0.0.0"}, "api_keys must name at least one key"),
        ("gateway", {"GATEWAY_STATE_DIR": "/proc/none"}, "the database sqlite+aiosqlite:////proc/none/gateway.db"),
        ("trainer_service", {}, "--base-model (TRAINER_BASE_MODEL)"),
        ("sampler_service", {}, "--base-model (SAMPLER_BASE_MODEL)"),
    ],
)
def test_a_mistake_is_named(service: str, environment: dict[str, str], expected: str, tmp_path: Path) -> None:
    environment = {"GATEWAY_STATE_DIR": str(tmp_path)} | environment
    done = subprocess.run(
        [sys.executable, "-m", service], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert "tml-secret" not in done.stderr


def test_the_password_of_the_database_is_not_logged() -> None:
    url = "postgresql+asyncpg://tinsmith:tml-secret@127.0.0.1:1/none"
    done = subprocess.run(
        [sys.executable, "-m", "gateway"],
        capture_output=True,
        text=True,
        env=os.environ | {"GATEWAY_DATABASE_URL": url},
        check=False,
    )
    assert done.returncode == 1
    assert "tml-secret" not in done.stdout + done.stderr
