"""What each path does."""

from __future__ import annotations

from starlette.convertors import StringConvertor, register_url_convertor


class _Id(StringConvertor):
    """A part of a path: without a NUL character, which PostgreSQL does not take in an id. No route has such a path."""

    regex = "[^/\0]+"


# Before a module of routes is imported: a Route looks its convertors up when it is made.
register_url_convertor("str", _Id())
