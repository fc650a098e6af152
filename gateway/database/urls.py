"""URLs of databases, which may hold passwords."""

from __future__ import annotations

import re

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError


def parse(url: str) -> URL:
    """Parses the URL. Raises ValueError, whose text does not repeat the URL, because any part of it may be a
    password."""
    try:
        parsed = make_url(url)
        dialect = parsed.get_dialect()
        if dialect.is_async:
            dialect.import_dbapi()
    except ModuleNotFoundError as error:
        raise ValueError(f"needs the Python package {error.name}, which is not installed") from None
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise ValueError("is no SQLAlchemy URL, such as postgresql+asyncpg://USER:PASSWORD@HOST/NAME") from None
    if not dialect.is_async:
        raise ValueError("names no driver for asyncio, such as postgresql+asyncpg://... or sqlite+aiosqlite:///...")
    return parsed


def without_secrets(url: str) -> str:
    """The URL without user, password and options, even when an "@" in the password is not escaped."""
    return re.sub("//.*@", "//***@", url.partition("?")[0])
