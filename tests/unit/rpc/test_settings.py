"""A mistake in the configuration is one line that names the setting, not a traceback, and shows no secret."""

import os
from pathlib import Path

import pytest

from tests.support.forking import command, run


@pytest.mark.parametrize(
    ("service", "environment", "expected"),
    [
        ("gateway", {"GATEWAY_API_KEYS": "tml-secret"}, "--api-keys (GATEWAY_API_KEYS): is not JSON"),
        ("gateway", {"GATEWAY_TOKENIZERS": "tml-secret"}, "--tokenizers (GATEWAY_TOKENIZERS): is not JSON"),
        ("gateway", {"GATEWAY_PORT": "99999"}, "--port (GATEWAY_PORT)"),
        ("gateway", {"GATEWAY_DATABASE_URL": "tml-secret"}, "--database-url (GATEWAY_DATABASE_URL)"),
        ("gateway", {"GATEWAY_HOST": "0.0.0.0"}, "api_keys must name at least one key"),
        ("gateway", {"GATEWAY_STATE_DIR": "/proc/none"}, "the database sqlite+aiosqlite:////proc/none/gateway.db"),
        ("trainer_service", {}, "--base-model (TRAINER_BASE_MODEL)"),
        ("sampler_service", {}, "--base-model (SAMPLER_BASE_MODEL)"),
    ],
)
async def test_a_mistake_is_named(service: str, environment: dict[str, str], expected: str, tmp_path: Path) -> None:
    done = await run(command, service, env=os.environ | {"GATEWAY_STATE_DIR": str(tmp_path)} | environment)
    assert done.status == 1
    assert expected in done.output
    assert "Traceback" not in done.output
    assert "tml-secret" not in done.output


async def test_the_password_of_the_database_is_not_logged() -> None:
    url = "postgresql+asyncpg://tinsmith:tml-secret@127.0.0.1:1/none"
    done = await run(command, "gateway", env=os.environ | {"GATEWAY_DATABASE_URL": url})
    assert done.status == 1
    assert "tml-secret" not in done.output
