"""Addresses of databases, which hold passwords."""

from __future__ import annotations

import re

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError


def parse(url: str) -> URL:
    """Raises ValueError, which does not repeat the URL: a part that is in the wrong place may be the password."""
    try:
        parsed = make_url(url)
        parsed.get_dialect().import_dbapi()
    except ModuleNotFoundError as error:
        raise ValueError(f"needs the Python package {error.name}, which is not installed") from None
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise ValueError("is no SQLAlchemy URL, such as postgresql+asyncpg://USER:PASSWORD@HOST/NAME") from None
    return parsed


def without_secrets(url: str) -> str:
    """Without user, password and options, also where an "@" in the password is not escaped."""
    return re.sub("//.*@", "//***@", url.partition("?")[0])
