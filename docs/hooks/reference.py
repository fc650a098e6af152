"""Writes the tables of the reference pages from the code, while the site is built.

`<!-- settings: trainer -->` in a page becomes the settings of that service, with the docstrings that are their help.
`<!-- commands -->` becomes the commands of `tinsmith` with their flags.
"""

from __future__ import annotations

import argparse
import html
import re
from typing import Any

from pydantic_settings import BaseSettings

from gateway.config import GatewayConfig
from sampler_service.config import SamplerConfig
from tinsmith_cli.commands import make_parser
from trainer_service.config import TrainerConfig

SERVICES: dict[str, type[BaseSettings]] = {"trainer": TrainerConfig, "sampler": SamplerConfig, "gateway": GatewayConfig}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    markdown = re.sub(r"<!-- settings: (\w+) -->", lambda found: settings(SERVICES[found[1]]), markdown)
    return markdown.replace("<!-- commands -->", commands(make_parser()))


def settings(service: type[BaseSettings]) -> str:
    """A table: environment variable, default, meaning."""
    rows = ["| variable | default | |", "|---|---|---|"]
    prefix = service.model_config.get("env_prefix", "")
    for name, field in service.model_fields.items():
        variable = prefix + name.upper()
        default = "needed" if field.is_required() else _default(field.get_default(call_default_factory=True))
        meaning = _cell(" ".join((field.description or "").split()))
        rows.append(f'| <span id="{variable}"></span>`{variable}` | {default} | {meaning} |')
    return "\n".join(rows)


def _default(value: object) -> str:
    if value is None:
        return "unset"
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return f"<code>{_cell(shown)}</code>" if shown else "empty"


def _cell(text: str) -> str:
    """Text for a cell of a table: nothing in it is markup but `code`."""
    pieces = html.escape(text, quote=False).replace("|", "\\|").split("`")
    return "`".join(piece if n % 2 else re.sub(r"([*_])", r"\\\1", piece) for n, piece in enumerate(pieces))


def commands(parser: argparse.ArgumentParser, words: str = "tinsmith") -> str:
    """A section for each command, with a table of its flags."""
    sections = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help for one in action._choices_actions}
            for name, command in action.choices.items():
                sections.append(f"## `{words} {name}`" if words == "tinsmith" else f"### `{words} {name}`")
                sections.append(_cell(_sentence(command.description or helps.get(name) or "")))
                sections += [_flags(command), commands(command, f"{words} {name}")]
    return "\n\n".join(section for section in sections if section)


def _flags(command: argparse.ArgumentParser) -> str:
    rows = []
    for action in command._actions:
        if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)) or action.help == argparse.SUPPRESS:
            continue
        metavar = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
        value = "" if action.nargs == 0 else str(metavar)
        name = f"{', '.join(action.option_strings)} {value}".strip()
        meaning = (action.help or "") % {**vars(action), "prog": command.prog}
        rows.append(f"| <code>{_cell(name)}</code> | {_cell(meaning)} |")
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]
