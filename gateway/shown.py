"""Short forms of a client's values, for error messages."""

from __future__ import annotations

from itertools import islice
from typing import Any

_LONGEST = 100
"""Most characters of a value that are shown."""
_ITEMS = 20
"""Most items of a list or an object of which the text is made."""
_DEPTH = 3
"""Levels of nested lists and objects of which the text is made."""


def shown_name(name: object) -> str:
    """The beginning of a key of a client's object. A key may be as long as the body."""
    return str(name)[:_LONGEST]


def shown(value: Any) -> str:
    """The beginning of repr(value), without computing the whole repr: the value may be as large as a body."""
    text = repr(_beginning(value, _DEPTH))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _beginning(value: Any, depth: int) -> Any:
    match value:
        case str() | bytes():
            return value[: _LONGEST + 1]
        case list():
            return [_beginning(each, depth - 1) for each in value[:_ITEMS]] if depth else []
        case dict():
            items = islice(value.items(), _ITEMS) if depth else ()
            return {_beginning(key, depth): _beginning(each, depth - 1) for key, each in items}
    return value


def shown_given(value: Any) -> str:
    """The text of `shown`, or "nothing" for a value that is null or missing."""
    return "nothing" if value is None else shown(value)
