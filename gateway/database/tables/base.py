"""The database: an index of what exists. Times are seconds since 1970, UTC."""

from __future__ import annotations

from sqlalchemy.orm import DeclarativeBase


class Base(DeclarativeBase):
    pass
