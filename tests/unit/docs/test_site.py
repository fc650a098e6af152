"""The documentation site: strict links, whole reference pages, nothing from other servers, true messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from sampler_service.config import SamplerConfig
from trainer_service.config import TrainerConfig

ROOT = Path(__file__).parents[3]
SOURCES = ("gateway", "trainer_service", "sampler_service", "tinsmith", "tinsmith_cli")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize("service", [TrainerConfig, SamplerConfig, GatewayConfig])
def test_every_setting_is_on_the_page(site: Path, service: type[TrainerConfig | SamplerConfig | GatewayConfig]) -> None:
    page = (site / "reference/configuration/index.html").read_text()
    prefix = service.model_config.get("env_prefix", "")
    names = {prefix + name.upper() for name in service.model_fields}
    assert names <= set(re.findall(r'id="(\w+)"', page))
    unexplained = [name for name, field in service.model_fields.items() if not field.description]
    assert unexplained == []


@pytest.mark.parametrize("command", ["tinsmith up", "tinsmith keys create", "tinsmith checkpoints", "tinsmith doctor"])
def test_commands_are_on_the_page(site: Path, command: str) -> None:
    assert f"<code>{command}</code>" in (site / "reference/command-line/index.html").read_text()


def test_a_page_loads_nothing_from_other_servers(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loads = (
        r'<(?:script|img|iframe)\b[^>]*\bsrc="?(?:https?:)?//|<link\b[^>]*rel="?stylesheet"?[^>]*href="?(?:https?:)?//'
    )
    assert [page.name for page in pages if re.search(loads, page.read_text())] == []


def test_a_guide_shows_its_program(site: Path) -> None:
    assert "create_lora_training_client" in (site / "guides/supervised/index.html").read_text()


def test_the_messages_of_the_page_are_in_the_code() -> None:
    code = "".join(path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = [message for message in re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE) if "..." in message]
    assert len(messages) > 9
    for message in messages:
        for piece in message.split("..."):
            assert piece.strip(" :;,") in code, piece
