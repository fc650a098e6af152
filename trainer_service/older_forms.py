"""Converts messages that earlier versions wrote into today's form. A field whose type has changed has a new number.

The journal holds protobuf messages; manifests and certificates are JSON. Files are not rewritten: a message is
converted each time it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tinsmith.rpc.times import duration, timestamp
from tinsmith.rpc.words import value_of
from tinsmith.v1 import types_pb2

M = TypeVar("M", bound=Message)
Json = dict[str, Any]


def _optimizer(word: str) -> int:
    """Enum value of an optimizer's name. An unknown name becomes -1, which is refused later."""
    try:
        return value_of(types_pb2.Optimizer, word)
    except ValueError:
        return -1


def _time(fixed64: int) -> Message:
    return timestamp(_double(fixed64))


def _lasting(fixed64: int) -> Message:
    return duration(_double(fixed64))


def _double(fixed64: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", fixed64))[0]


def _kind(utf8: bytes) -> int:
    return _optimizer(utf8.decode(errors="replace"))


_MOVED: Mapping[str, Mapping[int, tuple[str, Callable[[Any], Any]]]] = {
    "tinsmith.v1.CreateModelRequest": {4: ("optimizer", _kind)},
    "tinsmith.v1.SaveCheckpointRequest": {6: ("ttl", duration)},
    "tinsmith.v1.ModelInfo": {4: ("optimizer", _kind)},
    "tinsmith.v1.CheckpointInfo": {8: ("created_at", _time), 11: ("ttl", duration), 13: ("optimizer", _kind)},
    "tinsmith.v1.PublishCertificate": {4: ("publish_time", _lasting), 8: ("issued_at", _time)},
}
"""For each message, by former field number: today's field, and the conversion of the value on the wire."""


def carried_over(message: M) -> M:
    """Moves values of former fields to today's fields, in a message and the messages within it. Returns the message."""
    moved = _MOVED.get(message.DESCRIPTOR.full_name)
    if moved is not None:
        for unknown in UnknownFieldSet(message):
            if unknown.field_number in moved:
                name, convert = moved[unknown.field_number]
                value = convert(unknown.data)
                if isinstance(value, Message):
                    getattr(message, name).CopyFrom(value)
                else:
                    setattr(message, name, value)
        message.DiscardUnknownFields()
    for field, value in message.ListFields():
        if field.message_type is not None and not field.is_repeated:
            carried_over(value)
    return message


def checkpoint_of_format_1(content: Json) -> Json:
    """Today's JSON of a CheckpointInfo. `content`: from a manifest of format 1."""
    content = dict(content)
    if "created_at" in content:
        content["created_at"] = timestamp(content["created_at"]).ToJsonString()
    if "ttl_seconds" in content:
        content["ttl"] = duration(int(content.pop("ttl_seconds"))).ToJsonString()
    if "optimizer" in content:
        content["optimizer"] = _optimizer(content["optimizer"])
    return content


def certificate_of_any_age(content: Json) -> Json:
    """Today's JSON of a PublishCertificate. `content`: from any version; earlier ones wrote times as seconds."""
    content = dict(content)
    if "publish_seconds" in content:
        content["publish_time"] = duration(content.pop("publish_seconds")).ToJsonString()
    if isinstance(content.get("issued_at"), float | int):
        content["issued_at"] = timestamp(content["issued_at"]).ToJsonString()
    return content
