"""URLs of PostgreSQL databases, which may hold passwords."""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import urlsplit


def check_url(url: str) -> str:
    """Returns the URL. Raises ValueError for an invalid URL, and without the package asyncpg. The error's text does not
    repeat the URL, because any part of it may be a password."""
    if find_spec("asyncpg") is None:
        raise ValueError("needs the Python package asyncpg: pip install 'tinsmith[postgres]'")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("postgresql", "postgres") and bool(parts.path.strip("/"))
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("is not of the form postgresql://USER:PASSWORD@HOST/NAME")
    return url


def described(url: str) -> str:
    """The URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
