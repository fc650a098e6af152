"""Routes: one file for each subject, with the handlers of its paths."""

from __future__ import annotations

from starlette.convertors import StringConvertor, register_url_convertor


class _Id(StringConvertor):
    """A part of a path without NUL, which PostgreSQL does not take in an id. A path with NUL matches no route."""

    regex = "[^/\0]+"


# Must run before a module of routes is imported, because a Route looks up its convertors when it is made.
register_url_convertor("str", _Id())
