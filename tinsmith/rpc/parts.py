"""Counts the parts of a protobuf message before it is decoded, and finds fields that its type does not have.

A part may take two bytes on the wire, and some 50 once it is decoded. Handlers loop over parts on the event loop.
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
"""The field of Tensor with its dimensions, and its most bytes: 8 numbers. A byte of it becomes 8 once it is decoded."""
_VARINT, _FIXED64, _SIZED, _GROUP, _FIXED32 = 0, 1, 2, 3, 5
_WIRES = {_VARINT, _FIXED64, _SIZED, _GROUP, _FIXED32}
"""Wire types that a field may begin with."""


def check_parts(body: bytes, kind: Descriptor) -> None:
    """Raises InvalidRequest for a message of more than MOST_PARTS parts (messages and texts in lists, entries of maps),
    of many more fields, or with a field that its type does not have. Packed numbers are one field.

    The part of a broken message before the break is checked. The decoder will report the break.
    """
    num_parts = num_fields = 0
    messages = [(kind, 0, len(body), "")]
    try:
        while messages:
            kind, at, end, path = messages.pop()
            known, wires = _sized_fields(kind), _wires(kind)
            entries: dict[int, int] = {}
            while at < end:
                num_fields += 1
                if num_fields > _MOST_FIELDS:
                    where = path.removesuffix(".") or kind.name
                    raise InvalidRequest(f"{where}: the message has more than {_MOST_FIELDS} fields", field=where)
                tag, at = varint(body, at)
                wire = tag & 7
                if tag >> 3 and wire in _WIRES and wire not in wires.get(tag >> 3, ()):
                    where = f"{path}field number {tag >> 3}"
                    raise InvalidRequest(
                        f"{where}: this server knows no such field and cannot apply it; leave it out", field=where
                    )
                if wire != _SIZED:
                    at = varint(body, at)[1] if wire == _VARINT else at + {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
                    continue
                size, at = varint(body, at)
                if (field := known.get(tag >> 3)) is not None:
                    where = f"{path}{field.name}"
                    if field.name == _SHAPE:
                        if size > _MOST_SHAPE_BYTES:
                            raise InvalidRequest(f"{where}: the tensor has too many dimensions", field=where)
                    elif field.is_repeated:
                        entry = entries[field.number] = entries.get(field.number, 0) + 1
                        num_parts += 1
                        if num_parts > MOST_PARTS:
                            raise InvalidRequest(
                                f"{where}: the message has more than {MOST_PARTS} parts by entry {entry - 1}",
                                field=where,
                            )
                        where = f"{where}[{entry - 1}]"
                    if field.message_type is not None:
                        messages.append((field.message_type, at, min(at + size, end), f"{where}."))
                at += size
    except IndexError:
        pass


def refuse_unknown(message: Message, body: bytes) -> None:
    """Raises InvalidRequest for a small message with a field that its type does not have, at any depth: the value could
    not be applied. `body`: the message on the wire, in which the field is found for the error.

    Removes the unknown fields: that, and two measurements, take a fraction of the time of a walk along the wire.
    """
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != num_bytes:
        check_parts(body, cast(Descriptor, message.DESCRIPTOR))
        raise InvalidRequest("the message has a field that this server does not know and cannot apply; leave it out")


@functools.cache
def _wires(kind: Descriptor) -> dict[int, tuple[int, ...]]:
    """By number, the wire types that a field of this message may have."""
    types = FieldDescriptor
    fixed = {types.TYPE_DOUBLE: _FIXED64, types.TYPE_FIXED64: _FIXED64, types.TYPE_SFIXED64: _FIXED64}
    fixed |= {types.TYPE_FLOAT: _FIXED32, types.TYPE_FIXED32: _FIXED32, types.TYPE_SFIXED32: _FIXED32}
    sized = (types.TYPE_BYTES, types.TYPE_STRING, types.TYPE_MESSAGE)

    def of(field: FieldDescriptor) -> tuple[int, ...]:
        if field.type in sized:
            return (_SIZED,)
        wire = fixed.get(field.type, _VARINT)
        return (wire, _SIZED) if field.is_repeated else (wire,)  # packed or not

    return {field.number: of(field) for field in kind.fields}


@functools.cache
def _sized_fields(kind: Descriptor) -> dict[int, FieldDescriptor]:
    """By number, the fields that hold messages, the lists of texts, and the shape of a tensor."""
    texts = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)
    return {
        field.number: field
        for field in kind.fields
        if field.message_type is not None or (field.is_repeated and field.type in texts) or field.name == _SHAPE
    }


def varint(body: bytes, at: int) -> tuple[int, int]:
    """The varint at this place, and the place after it. Raises IndexError when it is cut off."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError
