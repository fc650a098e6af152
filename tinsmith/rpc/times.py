"""Conversions between seconds, Python's form of a time, and Timestamp and Duration, their forms in the contract.

Times are rounded to a microsecond.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tinsmith.errors import InvalidRequest

_LONGEST_S = 315_576_000_000
"""Ten thousand years in seconds: the largest Duration."""


def timestamp(seconds: float) -> Timestamp:
    """A Timestamp of `seconds` since 1970, UTC."""
    message = Timestamp()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def duration(seconds: float) -> Duration:
    """A Duration of `seconds`."""
    message = Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def check_ttl(ttl: Duration, *, field: str) -> None:
    """Raises InvalidRequest, naming `field`, unless the lifetime is from 1 s to 10,000 years."""
    if not 0 <= ttl.nanos < 1_000_000_000:
        raise InvalidRequest(f"{field}.nanos: {ttl.nanos} is outside 0..999999999", field=f"{field}.nanos")
    if not 1 <= ttl.seconds <= _LONGEST_S:
        raise InvalidRequest(f"{field}: {seconds_of(ttl):g} s is not a lifetime of 1 s up to 10,000 years", field=field)


def seconds_of(message: Timestamp | Duration) -> float:
    """Length of a Duration, or time of a Timestamp since 1970, UTC, in seconds."""
    return message.seconds + message.nanos / 1e9
