"""Parses the base models to serve, and their public names, from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.tiktoken", "*.model", "tekken.json")


class UsageError(Exception):
    """A mistake in the command line. The message names the flag and the value, and says what would be right."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Weights that one trainer and its samplers load, and the names under which clients use them."""

    source: str
    """Absolute path of a folder, or hub id."""
    names: tuple[str, ...]
    """Public names. The first one is the main name."""

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether the source is a folder without files of a tokenizer. transformers makes an empty tokenizer of such a
        folder."""
        folder = Path(self.source)
        return folder.is_dir() and not any(file.match(kind) for file in folder.iterdir() for kind in _TOKENIZER_FILES)


def parse(specs: Sequence[str], *, models_file: Path | None = None) -> list[ServedModel]:
    """Groups arguments of the forms NAME=PATH, PATH and HUB_ID by their weights, in the given order.

    A PATH alone is served under its folder's name, a HUB_ID alone under the id. Links in paths are resolved before the
    comparison, so a folder with several names is loaded once. Raises UsageError.
    """
    pairs = [_parse_one(spec) for spec in specs]
    if models_file is not None:
        pairs += _read(models_file)
    source_of: dict[str, str] = {}
    for name, source in pairs:
        if source_of.setdefault(name, source) != source:
            raise UsageError(f"--base-model: {name!r} names both {source_of[name]} and {source}; a name has one model")
    names_of: dict[str, list[str]] = {}
    for name, source in source_of.items():
        names_of.setdefault(source, []).append(name)
    return [ServedModel(source, tuple(names)) for source, names in names_of.items()]


def _parse_one(spec: str) -> tuple[str, str]:
    name, equals, value = spec.partition("=")
    if not equals:
        source = resolve(spec, spec=spec)
        return (Path(source).name if Path(source).is_absolute() else source), source
    if not name or not value:
        raise UsageError(f"--base-model: {spec!r} is not NAME=PATH; both sides must be given")
    return name, resolve(value, spec=spec)


def resolve(value: str, *, spec: str, flag: str = "--base-model") -> str:
    """Absolute path of a folder that holds a model, or a hub id. Raises UsageError."""
    path = Path(value).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{flag}: {spec!r}: {path} holds no config.json, so it is not a Hugging Face model")
        return str(path.resolve())
    if not value.startswith((".", "/", "~")) and _HUB_ID.fullmatch(value):
        return value
    raise UsageError(f"{flag}: {spec!r}: {value} is neither a folder nor a hub id such as Qwen/Qwen3-0.6B")


def _read(models_file: Path) -> list[tuple[str, str]]:
    try:
        models = json.loads(models_file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"--models-file: cannot read {models_file}: {error}") from None
    if not isinstance(models, dict) or not all(isinstance(value, str) for value in models.values()):
        raise UsageError(f'--models-file: {models_file} must hold one JSON object {{"name": "path", ...}}')
    return [(name, resolve(value, spec=f"{name}={value}")) for name, value in models.items()]
