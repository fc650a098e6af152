"""How every service reads its settings: flags and environment, and one clear line for each mistake."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsError

Settings = TypeVar("Settings", bound=BaseSettings)


def read_settings(cls: type[Settings]) -> Settings:
    """Raises SystemExit that names each setting that is wrong. Never prints a value: it may be a secret."""
    prefix = cls.model_config.get("env_prefix", "")
    try:
        return CliApp.run(cls)
    except ValidationError as error:
        problems = [
            f"  {_names(prefix, '.'.join(str(part) for part in problem['loc']))}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
    except SettingsError as error:
        problems = [f'  {error}: lists are JSON, such as \'["one", "two"]\'']
    raise SystemExit("\n".join(["the configuration is not valid:", *problems]))


def _names(prefix: str, field: str) -> str:
    if not field:
        return "settings"
    return f"--{field.replace('_', '-')} ({prefix}{field.upper()})"
