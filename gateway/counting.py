"""Counts the values in a body before it is parsed.

A parser holds the interpreter's lock until it is done, so the event loop waits, whichever thread parses. The parsed
objects may also take a hundred times the memory of the body. Counting is cheap, and other threads can run meanwhile. So
a body is counted first, and one with too many values is not parsed.
"""

from __future__ import annotations

import functools

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_CONTAINER_COST = 10
_MEMBER_COST = 3
"""Count of a list or an object, and of each member of an object beside its value; a number counts 1."""
_PIECE_BYTES = 2**16
"""Bytes of a body that are counted in one go. The event loop can run between two pieces."""
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5


def json_values(body: bytes, *, limit: int) -> int:
    """An upper bound of the values in a JSON text, by its punctuation. Stops counting above `limit`.

    A list or an object counts as 10, and a member of an object as 3 more than its value.
    """
    if (at_most := 1 + _punctuation(body)) <= limit:
        return at_most
    # The quick count includes punctuation inside texts, which may make it too high. Count again without that.
    count, is_text, rest = 1, False, b""
    for start in range(0, len(body), _PIECE_BYTES):
        piece = rest + body[start : start + _PIECE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        rest = piece[len(piece) - num_backslashes % 2 :]  # a backslash that escapes the next byte
        piece = piece[: len(piece) - len(rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        count += _punctuation(b"".join(parts[is_text::2]))
        is_text ^= len(parts) % 2 == 0
        if count > limit:
            break
    return count


def _punctuation(text: bytes) -> int:
    num_containers = text.count(b"[") + text.count(b"{")
    return text.count(b",") + _MEMBER_COST * text.count(b":") + _CONTAINER_COST * num_containers


@functools.cache
def _inside(kind: Descriptor) -> dict[int, Descriptor | None]:
    """Field number -> type of the message in a field with a size; None for packed numbers. Texts are left out."""
    texts = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)
    return {field.number: field.message_type for field in kind.fields if field.type not in texts}


def protobuf_values(body: bytes, kind: Descriptor, *, limit: int) -> int:
    """Number of fields of a message and the messages in it, plus bytes of packed numbers. Stops counting above `limit`.

    In a broken message, only what comes before the break is counted.
    """
    count = 0
    messages = [(kind, 0, len(body))]
    try:
        while messages and count <= limit:
            kind, at, end = messages.pop()
            inside = _inside(kind)
            while at < end and count <= limit:
                count += 1
                tag, at = _varint(body, at) if body[at] >= 0x80 else (body[at], at + 1)
                wire = tag & 7
                if wire == _SIZED:
                    size, at = _varint(body, at) if body[at] >= 0x80 else (body[at], at + 1)
                    if (number := tag >> 3) in inside:
                        if (found := inside[number]) is None:
                            count += size
                        else:
                            messages.append((found, at, min(at + size, end)))
                    at += size
                elif wire == _VARINT:
                    _, at = _varint(body, at)
                else:
                    at += 8 if wire == _FIXED64 else 4 if wire == _FIXED32 else 0
    except IndexError:
        pass  # the message is broken, which the parser will report
    return count


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The varint at this place, and the place after it. Raises IndexError when it is cut off."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError
