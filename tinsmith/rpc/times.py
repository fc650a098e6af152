"""Conversions between seconds, as Python has them, and Timestamp and Duration, as the contract has them.

Times are rounded to a microsecond.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tinsmith.rpc.errors import InvalidRequest

_LONGEST_S = 315_576_000_000
"""Ten thousand years, the most that a Duration may hold, in seconds."""


def timestamp(seconds: float) -> Timestamp:
    """A Timestamp. `seconds`: since 1970, UTC."""
    message = Timestamp()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def duration(seconds: float) -> Duration:
    """A Duration of so many seconds."""
    message = Duration()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def check_ttl(ttl: Duration, *, field: str) -> None:
    """Raises InvalidRequest for a lifetime that is not 1 s up to 10,000 years."""
    if not (1 <= ttl.seconds <= _LONGEST_S and 0 <= ttl.nanos < 1_000_000_000):
        raise InvalidRequest(f"{field}: {seconds_of(ttl):g} s is not a lifetime of 1 s up to 10,000 years", field=field)


def seconds_of(message: Timestamp | Duration) -> float:
    """Seconds of a Duration, or of a Timestamp since 1970, UTC."""
    return message.seconds + message.nanos / 1e9
