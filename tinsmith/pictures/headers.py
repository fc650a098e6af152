"""Reads the size of a PNG or JPEG from its first bytes, without a library and without decoding a pixel."""

from __future__ import annotations

import struct

from tinsmith.errors import InvalidRequest

FORMATS = ("png", "jpeg")
MAX_BYTES = 20 * 2**20
"""Most bytes of an encoded picture."""
MAX_PIXELS = 2**25
"""Most pixels of a picture, about 33 megapixels. Decoding takes up to 12 bytes of memory for each."""
_MAX_SCANS = 100
"""Most scans of a JPEG. Each passes over all pixels; encoders make about 10 for a progressive picture."""
PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}
"""JPEG markers that no length follows: TEM, restarts, start of image."""
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_START_OF_FRAME = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def size_of(data: bytes, file_format: str, *, field: str) -> tuple[int, int]:
    """Width and height in pixels, before any rotation that the file's metadata asks for.

    Raises InvalidRequest, naming `field` and the reason: too many bytes or pixels, another format than `file_format`,
    an animation, or a header that is broken.
    """
    if file_format not in FORMATS:
        raise InvalidRequest(f"{field}.format: {file_format[:40]!r} is not one of png, jpeg", field=f"{field}.format")
    if len(data) > MAX_BYTES:
        raise refusal(field, f"has {len(data)} bytes, and this server allows {MAX_BYTES} for one")
    if not data.startswith(PNG if file_format == "png" else _JPEG):
        begins = f"begins with {data[:8].hex(' ')}" if data else "is empty"
        raise refusal(field, f"is no {file_format} file: it {begins}")
    width, height = _png_size(data, field) if file_format == "png" else _jpeg_size(data, field)
    if width < 1 or height < 1:
        raise refusal(field, f"has {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise refusal(
            field, f"has {width} x {height} pixels, and this server allows {MAX_PIXELS} in all; scale it down"
        )
    return width, height


def refusal(field: str, reason: str) -> InvalidRequest:
    """The error for a picture. `field`: path of its chunk."""
    return InvalidRequest(f"{field}.data: the picture {reason}", field=f"{field}.data")


def _png_size(data: bytes, field: str) -> tuple[int, int]:
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise refusal(field, "is broken: its PNG header is cut off")
    at = 33
    while at + 8 <= len(data):  # an animation has a chunk acTL before its first pixels
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"acTL":
            raise refusal(field, "is animated; send one frame")
        if kind == b"IDAT":
            break
        at += 12 + length
    return struct.unpack_from(">II", data, 16)


def _jpeg_size(data: bytes, field: str) -> tuple[int, int]:
    at, size = 2, None
    while size is None:
        at = data.find(b"\xff", at)
        if at < 0 or at + 4 > len(data):
            raise refusal(field, "is broken: its JPEG header is cut off")
        marker = data[at + 1]
        if marker == 0xFF:  # padding before a marker
            at += 1
            continue
        if marker in (_START_OF_SCAN, _END_OF_IMAGE):
            raise refusal(field, "is broken: its JPEG header names no size")
        if marker in _START_OF_FRAME:
            if at + 9 > len(data):
                raise refusal(field, "is broken: its JPEG header is cut off")
            height, width = struct.unpack_from(">HH", data, at + 5)
            size = width, height
        at += 2 if marker in _WITHOUT_LENGTH else 2 + struct.unpack_from(">H", data, at + 2)[0]
    num_scans = data.count(bytes((0xFF, _START_OF_SCAN)))
    if num_scans > _MAX_SCANS:
        raise refusal(field, f"has {num_scans} scans, and this server allows {_MAX_SCANS}")
    return size
