"""Counts the parts of a protobuf message before it is decoded, and finds fields that its type does not have.

Parts are the messages and texts in lists, and the entries of maps. A part may take two bytes on the wire and about 50
bytes of memory once it is decoded, and handlers loop over parts on the event loop.
"""

from __future__ import annotations

import functools
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tinsmith.errors import InvalidRequest

MOST_PARTS = 131_072
"""Most parts of one message: 32 in each of the 4,096 datums of the largest batch."""
_MOST_FIELDS = 8 * MOST_PARTS
"""Most fields on the wire, of the message and of all messages in it."""
_SHAPE, _MOST_SHAPE_BYTES = "shape", 80
"""Name of Tensor's field with its dimensions, and most bytes of this field: 8 numbers of at most 10 bytes. Each byte of
the field may take 8 bytes of memory once it is decoded."""
_VARINT, _FIXED64, _SIZED, _GROUP, _FIXED32 = 0, 1, 2, 3, 5
_WIRES = {_VARINT, _FIXED64, _SIZED, _GROUP, _FIXED32}
"""Wire types that a field may begin with."""
_Path = tuple["_Path", str, int | None] | None
"""Place of a message in an outer message: the path of the outer message, the name of the field, and the index in the
field if it is a list. None for the outermost message."""


def check_parts(body: bytes, kind: Descriptor) -> None:
    """Raises InvalidRequest for a message of more than MOST_PARTS parts, of more than _MOST_FIELDS fields, or with a
    field that its type does not have. Packed numbers are one field.

    A broken message is checked up to the place where it is broken, and so is each message in it. The decoder reports
    broken messages.
    """
    num_parts = num_fields = 0
    messages: list[tuple[Descriptor, int, int, _Path]] = [(kind, 0, len(body), None)]
    while messages:
        kind, at, end, path = messages.pop()
        fields = _fields(kind)
        entries: dict[int, int] = {}
        try:
            while at < end:
                num_fields += 1
                if num_fields > _MOST_FIELDS:
                    where = _in_words(path) or kind.name
                    raise InvalidRequest(f"{where}: the message has more than {_MOST_FIELDS} fields", field=where)
                tag = body[at]
                at += 1
                if tag >= 0x80:
                    tag, at = varint(body, at - 1)
                wire = tag & 7
                if tag not in fields:
                    if not tag >> 3 or wire not in _WIRES:
                        break
                    where = _in_words((path, f"field number {tag >> 3}", None))
                    raise InvalidRequest(
                        f"{where}: this server knows no such field and cannot apply it; leave it out", field=where
                    )
                if wire == _VARINT:
                    at = varint(body, at)[1] if body[at] >= 0x80 else at + 1
                    continue
                if wire != _SIZED:
                    at += 8 if wire == _FIXED64 else 4
                    continue
                size = body[at]
                at += 1
                if size >= 0x80:
                    size, at = varint(body, at - 1)
                if (counted := fields[tag]) is not None:
                    name, is_repeated, inner = counted
                    entry = None
                    if name == _SHAPE:
                        if size > _MOST_SHAPE_BYTES:
                            where = _in_words((path, name, None))
                            raise InvalidRequest(f"{where}: the tensor has too many dimensions", field=where)
                    elif is_repeated:
                        entry = entries.get(tag, 0)
                        entries[tag] = entry + 1
                        num_parts += 1
                        if num_parts > MOST_PARTS:
                            where = _in_words((path, name, None))
                            raise InvalidRequest(
                                f"{where}: the message has more than {MOST_PARTS} parts by entry {entry}", field=where
                            )
                    if inner is not None:
                        messages.append((inner, at, min(at + size, end), (path, name, entry)))
                at += size
        except IndexError:  # the message is cut off
            continue


def refuse_unknown(message: Message, body: bytes) -> None:
    """Raises InvalidRequest for a small message that has, at any depth, a field that its type does not have, because
    the field could not be applied. `body`: the message on the wire, in which the error's text looks up the field.

    Unknown fields are found by removing them and comparing the message's size before and after. This takes a fraction
    of the time of `check_parts`, which walks along the wire.
    """
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != num_bytes:
        check_parts(body, cast(Descriptor, message.DESCRIPTOR))
        raise InvalidRequest("the message has a field that this server does not know and cannot apply; leave it out")


@functools.cache
def _fields(kind: Descriptor) -> dict[int, tuple[str, bool, Descriptor | None] | None]:
    """The fields of a message type by tag, which is the number of a field and its wire type. Fields that hold messages,
    lists of texts, and the shape of a tensor map to their name, whether they are repeated, and the type of their
    messages. All other fields map to None."""
    types = FieldDescriptor
    fixed = {types.TYPE_DOUBLE: _FIXED64, types.TYPE_FIXED64: _FIXED64, types.TYPE_SFIXED64: _FIXED64}
    fixed |= {types.TYPE_FLOAT: _FIXED32, types.TYPE_FIXED32: _FIXED32, types.TYPE_SFIXED32: _FIXED32}
    found: dict[int, tuple[str, bool, Descriptor | None] | None] = {}
    for field in kind.fields:
        is_sized = field.type in (types.TYPE_BYTES, types.TYPE_STRING, types.TYPE_MESSAGE)
        wires = [_SIZED] if is_sized else [fixed.get(field.type, _VARINT)]
        if field.is_repeated and not is_sized:
            wires.append(_SIZED)  # packed
        is_counted = field.message_type is not None or (field.is_repeated and is_sized) or field.name == _SHAPE
        counted = (field.name, field.is_repeated, field.message_type) if is_counted else None
        found |= {field.number << 3 | wire: counted for wire in wires}
    return found


def _in_words(path: _Path) -> str:
    """The path as text for an error: names joined by dots, with the index of a list's entry in brackets."""
    words: list[str] = []
    while path is not None:
        path, name, entry = path
        words.append(name if entry is None else f"{name}[{entry}]")
    return ".".join(reversed(words))


def varint(body: bytes, at: int) -> tuple[int, int]:
    """The varint at index `at` of `body`, and the index after it. Raises IndexError if the varint is cut off."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError
