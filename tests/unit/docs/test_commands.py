"""Commands and settings that the manuals name are ones that there are."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from sampler_service.config import SamplerConfig
from tinsmith_cli import up
from trainer_service.config import TrainerConfig

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md", DOCS.parent / "benchmarks" / "README.md"]
MANUALS = ["operations.md", "quickstart-gpu.md"]
SETTINGS = {
    "trainer_service": TrainerConfig.model_fields,
    "sampler_service": SamplerConfig.model_fields,
    "gateway": GatewayConfig.model_fields,
}
FLAGS = {module: {f"--{name.replace('_', '-')}" for name in fields} for module, fields in SETTINGS.items()}


def commands(manual: str) -> list[str]:
    """The indented lines, continued ones in one."""
    text = (DOCS / manual).read_text().replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def flags(words: str) -> set[str]:
    return set(re.findall(r"(?<!\S)--[a-z][a-z-]*", words))


@pytest.mark.parametrize("manual", MANUALS)
def test_commands_have_flags_that_there_are(manual: str) -> None:
    parser = argparse.ArgumentParser()
    up.add_parser(parser.add_subparsers())
    of_up = flags(_help_of_up(parser))
    found = commands(manual)
    assert found
    for line in found:
        if "tinsmith up" in line:
            assert flags(line.partition("tinsmith up")[2]) <= of_up, line
        if match := re.search(r"-m (trainer_service|sampler_service|gateway)\b(.*)", line):
            assert flags(match[2]) <= FLAGS[match[1]], line


def _help_of_up(parser: argparse.ArgumentParser) -> str:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices["up"].format_help().replace("[", " ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_that_are_named_exist(page: Path) -> None:
    for service, fields in (("trainer", "trainer_service"), ("sampler", "sampler_service"), ("gateway", "gateway")):
        own = {name.lower() for name in re.findall(rf"\b{service.upper()}_([A-Z_]+)\b", page.read_text())}
        assert own - {"gpu", "2_gpu"} <= set(SETTINGS[fields])


@pytest.mark.parametrize("manual", MANUALS)
def test_knobs_that_are_named_exist(manual: str) -> None:
    text = (DOCS / manual).read_text()
    every = {name for fields in SETTINGS.values() for name in fields}
    knobs = text.partition("\n## Knobs\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?: \w+)?`", knobs))
    assert named <= every | set(SETTINGS), named - every
