"""Damage that a power cut does to the end of SQLite's write-ahead log (https://www.sqlite.org/fileformat2.html#walformat)."""

from __future__ import annotations

import random
import struct
from pathlib import Path

_HEADER = struct.Struct(">8I")
"""Magic number, format, page size, checkpoint sequence, two salts, two checksums."""
_FRAME = struct.Struct(">6I")
"""Page number, size of the database after a commit, two salts, two checksums; a page follows."""


def cut_power(log: Path, rng: random.Random) -> str:
    """Tears up to a page from the end, or leaves a frame behind it that was being written. Returns what it did."""
    data = log.read_bytes() if log.exists() else b""
    if len(data) < _HEADER.size:
        return "an empty log stays"
    end, frame_bytes = _end(data)
    if end == _HEADER.size:
        return "a log without frames stays"
    if rng.random() < 0.5:
        torn = rng.randint(1, frame_bytes - _FRAME.size)
        log.write_bytes(data[: end - torn])
        return f"{torn} bytes torn from the end of {end}"
    begun = rng.randint(1, frame_bytes - 1)
    salts = data[16:24]
    frame = bytearray(data[end - frame_bytes : end])
    frame[8:16] = salts
    log.write_bytes(data[:end] + bytes(frame[: begun // 2]) + rng.randbytes(begun - begun // 2))
    return f"{begun} bytes of a frame behind {end}"


def _end(data: bytes) -> tuple[int, int]:
    """Where the frames of the present log end (older ones may lie behind), and how long a frame is."""
    _, _, page_bytes, _, *salts = _HEADER.unpack_from(data)[:6]
    frame_bytes = _FRAME.size + page_bytes
    end = _HEADER.size
    while end + frame_bytes <= len(data) and list(_FRAME.unpack_from(data, end)[2:4]) == salts:
        end += frame_bytes
    return end, frame_bytes
