"""Reads a service's settings from flags and environment, and reports each mistake in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsError

Settings = TypeVar("Settings", bound=BaseSettings)

_FIELD_OF_ERROR = re.compile(r'(?:field "|encountered for )(\w+)')
"""Finds the field's name in the text of a SettingsError. The text has one form for the environment, another for
flags."""


def read_settings(cls: type[Settings]) -> Settings:
    """The settings from flags and environment. Raises SystemExit that names each wrong setting. The text holds no
    value, which may be a secret."""
    prefix = cls.model_config.get("env_prefix", "")
    try:
        return CliApp.run(cls)
    except ValidationError as error:
        problems = [
            f"  {_names(prefix, '.'.join(str(part) for part in problem['loc']))}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
    except SettingsError as error:
        named = _FIELD_OF_ERROR.search(str(error))
        what = _names(prefix, named[1]) if named else str(error)
        problems = [
            f'  {what}: is not JSON, such as \'["one", "two"]\' for a list, \'{{"name": "value"}}\' for a mapping'
        ]
    raise SystemExit("\n".join(["the configuration is not valid:", *problems]))


def unknown_variables(cls: type[BaseSettings], names: Iterable[str]) -> list[str]:
    """A sentence for each environment variable in `names` that has the prefix of the settings but is no setting."""
    prefix = cls.model_config.get("env_prefix", "")
    known = [prefix + field.upper() for field in cls.model_fields]
    sentences = []
    for name in sorted(set(names)):
        if name.upper().startswith(prefix) and name.upper() not in known:
            likely = get_close_matches(name.upper(), known, n=1, cutoff=0.8)
            advice = f"; did you mean {likely[0]}?" if likely else ""
            sentences.append(f"{name} in the environment is no setting and has no effect{advice}")
    return sentences


def _names(prefix: str, field: str) -> str:
    """The flag and the environment variable of a field, for a message."""
    if not field:
        return "settings"
    return f"--{field.replace('_', '-')} ({prefix}{field.upper()})"
