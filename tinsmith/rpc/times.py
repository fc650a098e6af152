"""Seconds, as Python has them, to Timestamp and Duration, as the contract has them, and back. To a microsecond."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def timestamp(seconds: float) -> Timestamp:
    """`seconds` since 1970, UTC."""
    message = Timestamp()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def seconds_of(message: Timestamp | Duration) -> float:
    return message.seconds + message.nanos / 1e9
