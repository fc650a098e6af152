"""Parts of the schemas of JSON bodies and URL parameters: types of fields, and base classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from tinsmith.rpc.notes import MAX_CHARACTERS, MAX_ENTRIES, texts_of


def _storable(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character, which a database cannot store")
    return text


Text = Annotated[str, AfterValidator(_storable)]
"""A string that is stored, or looked up in the database; ids are such strings, too."""

Id = Annotated[str, Field(max_length=1000), AfterValidator(_storable)]
"""An id, a name or a path. Its length is bounded, because errors repeat it."""
RequestId = Annotated[str, Field(max_length=20_000), AfterValidator(_storable)]
"""A request id. It may be longer than other ids, because the id of a refused request holds the text of the refusal."""


def _as_text(value: Any) -> str:
    """The value as text. A value that is no string becomes its JSON, because the SDKs read notes as text."""
    return _storable(value if isinstance(value, str) else json.dumps(value))


Note = Annotated[Any, AfterValidator(_as_text)]
"""Any JSON value, which is stored as text."""


def _short_together(notes: Any) -> Any:
    if (number := sum(map(len, texts_of(notes)))) > MAX_CHARACTERS:
        raise ValueError(f"holds {number} characters in all, and this server keeps at most {MAX_CHARACTERS}")
    return notes


def _few(notes: Any) -> Any:
    """Refuses more than MAX_ENTRIES entries before they are validated, because an error for each of a hundred thousand
    wrong entries would block the event loop."""
    if isinstance(notes, dict | list) and len(notes) > MAX_ENTRIES:
        raise ValueError(f"has {len(notes)} entries, and this server keeps at most {MAX_ENTRIES}")
    return notes


_Bounded = BeforeValidator(_few)
Metadata = Annotated[dict[Text, Note], Field(max_length=MAX_ENTRIES), _Bounded, AfterValidator(_short_together)]
Tags = Annotated[list[Text], Field(max_length=MAX_ENTRIES), _Bounded, AfterValidator(_short_together)]


class _UpToOneError:
    """Marks a list whose validation ends at the first wrong item, because a million errors would block the event loop.

    pydantic's own mark, FailFast, cannot be part of a union.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cast(CoreSchema, handler(source) | {"fail_fast": True})


Item = TypeVar("Item")
Listed = Annotated[list[Item], _UpToOneError()]


_MAX_STOPS = 1024
Stops = Annotated[list[Item], _UpToOneError(), Field(max_length=_MAX_STOPS)]
_MAX_STOP_BYTES = 4096
"""Most bytes of the stop strings of one request, in UTF-8, since each new token is compared with all of them. Samplers
have the same bound."""


def _short_stops(stop: str | list[Any]) -> str | list[Any]:
    texts = [stop] if isinstance(stop, str) else [each for each in stop if isinstance(each, str)]
    if (number := sum(len(text.encode()) for text in texts)) > _MAX_STOP_BYTES:
        raise ValueError(f"holds {number} bytes of stop strings, and may hold at most {_MAX_STOP_BYTES} in all")
    return stop


ShortStops = AfterValidator(_short_stops)


class Known(BaseModel):
    """Base class of objects that clients send. Each field is applied or refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    """Unknown fields that are ignored, because they ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_set(cls, content: Any) -> Any:
        """Leaves out unknown fields that are null or harmless, and known fields that are null, unless null is one of
        the field's values. Keeps only the first other unknown field, which pydantic refuses, because an error for each
        of a hundred thousand unknown fields would block the event loop."""
        fields = _fields(cls)
        if not isinstance(content, dict) or (None not in content.values() and all(name in fields for name in content)):
            return content
        known = {
            name: content[name]
            for name, null_counts in fields.items()
            if name in content and (null_counts or content[name] is not None)
        }
        for name, value in content.items():
            if value is not None and name not in fields and name not in cls.HARMLESS:
                return {**known, name: value}
        return known


@cache
def _fields(schema: type[Known]) -> Mapping[str, bool]:
    """The schema's fields in its order: the name as clients write it -> whether the field can have the value null.
    Otherwise null means that the field is absent. A required field whose type includes None can have it, and so can a
    float, because JSON makes null of nan and inf."""
    return {
        field.alias or name: field.annotation is float
        or (field.is_required() and type(None) in get_args(field.annotation))
        for name, field in schema.model_fields.items()
    }


class TinkerBody(Known):
    model_config = ConfigDict(strict=True, protected_namespaces=())
    HARMLESS = frozenset({"type"})
    """The SDKs send `type` with each object. A schema that needs it has a field for it."""
