"""The values of the contract's enums as the words that the rest of the code, and the HTTP API, have for them.

OPTIMIZER_ADAMW of Optimizer is "adamw"; OPTIMIZER_UNSPECIFIED is the empty word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from tinsmith.rpc.errors import InvalidRequest


def word_of(enum: EnumTypeWrapper, value: int) -> str:
    """Word of an enum's value; empty for UNSPECIFIED. A value that this version does not know becomes its number."""
    prefix = _prefix(enum)
    if value not in enum.values():
        return str(value)
    return enum.Name(value).removeprefix(prefix).lower() if value else ""


def value_of(enum: EnumTypeWrapper, word: str) -> Any:  # the stubs have a type for each enum
    """Value of an enum's word; UNSPECIFIED for the empty word. Raises ValueError for an unknown word."""
    return enum.Value(_prefix(enum) + word.upper()) if word else 0


def _prefix(enum: EnumTypeWrapper) -> str:
    return enum.Name(0).removesuffix("UNSPECIFIED")


def choices(enum: EnumTypeWrapper, values: Iterable[int] = ()) -> str:
    """Names of these values, or of all values of the enum, without UNSPECIFIED, for an error's text."""
    return ", ".join(enum.Name(value) for value in (values or enum.values()) if value)


def check_known(enum: EnumTypeWrapper, value: int, *, field: str) -> None:
    """Raises InvalidRequest for a number that this version does not know."""
    if value not in enum.values():
        raise InvalidRequest(f"{field}: {value} is not one of {choices(enum)}", field=field)
