"""Base class of the tables. All times in them are seconds since 1970, UTC."""

from __future__ import annotations

from sqlalchemy.orm import DeclarativeBase


class Base(DeclarativeBase):
    pass
