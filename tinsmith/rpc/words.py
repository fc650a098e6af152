"""Converts the values of the contract's enums to the words that the rest of the code, and the HTTP API, use for them.

The word for OPTIMIZER_ADAMW of Optimizer is "adamw". The word for OPTIMIZER_UNSPECIFIED is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from tinsmith.errors import InvalidRequest


def word_of(enum: EnumTypeWrapper, value: int) -> str:
    """The word for an enum's value; empty for UNSPECIFIED. The decimal number for a value that this release does not
    know."""
    prefix = _prefix(enum)
    if value not in enum.values():
        return str(value)
    return enum.Name(value).removeprefix(prefix).lower() if value else ""


def value_of(enum: EnumTypeWrapper, word: str) -> Any:  # the stubs have a type for each enum
    """The enum's value for a word; UNSPECIFIED for the empty word. Raises ValueError for an unknown word."""
    return enum.Value(_prefix(enum) + word.upper()) if word else 0


def _prefix(enum: EnumTypeWrapper) -> str:
    return enum.Name(0).removesuffix("UNSPECIFIED")


def choices(enum: EnumTypeWrapper, values: Iterable[int] = ()) -> str:
    """The names of `values`, or of all values of the enum, without UNSPECIFIED, for the text of an error."""
    return ", ".join(enum.Name(value) for value in (values or enum.values()) if value)


def check_known(enum: EnumTypeWrapper, value: int, *, field: str) -> None:
    """Raises InvalidRequest, naming `field`, for a number that this release does not know."""
    if value not in enum.values():
        raise InvalidRequest(f"{field}: {value} is not one of {choices(enum)}", field=field)
