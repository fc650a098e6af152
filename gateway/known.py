"""The rule for fields that are not in a schema: they are refused by name, unless they are null."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Known(BaseModel):
    """Base class of objects that clients send. Each field is applied or refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    """Unknown fields that are ignored, because they ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_set(cls, content: Any) -> Any:
        """Leaves out unknown fields that are null or harmless. One of the others stays, and pydantic refuses it.

        An error for each of a hundred thousand unknown fields would block the event loop.
        """
        fields = _names(cls)
        if not isinstance(content, dict) or all(name in fields for name in content):
            return content
        known = {name: content[name] for name in fields if name in content}
        for name, value in content.items():
            if value is not None and name not in fields and name not in cls.HARMLESS:
                return {**known, name: value}
        return known


@cache
def _names(schema: type[Known]) -> Collection[str]:
    """Names of the schema's fields as clients write them, in the schema's order."""
    return {field.alias or name: None for name, field in schema.model_fields.items()}
