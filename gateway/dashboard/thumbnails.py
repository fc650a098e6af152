"""Small copies of the pictures in a prompt, for the dashboard."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence

from PIL import Image

from tinsmith.errors import ServiceError
from tinsmith.pictures.decoding import decode
from tinsmith.pictures.headers import size_of
from tinsmith.v1 import types_pb2

MAX_PICTURES = 4
"""Most pictures of a prompt that are shown, from its beginning."""
MAX_BYTES = 4 * 2**20
"""Most bytes of an encoded picture that is shown."""
_MAX_PIXELS = 2**22
"""Most pixels of a picture that is shown. Decoding takes up to 12 bytes of memory for each pixel. Only one picture is
decoded at a time."""
_SIDE = 96
"""Longest side of a thumbnail, in pixels."""
MAX_THUMBNAIL_BYTES = 8192
"""Most bytes of a thumbnail. A JPEG of 96 x 96 pixels of noise has about 5,000."""


def first_pictures(chunks: Sequence[types_pb2.Chunk]) -> tuple[types_pb2.Image, ...]:
    """The first pictures of a prompt. A picture with too many bytes is empty here, and gets no thumbnail."""
    images = [chunk.image for chunk in chunks if chunk.HasField("image")]
    return tuple(
        types_pb2.Image(data=one.data if len(one.data) <= MAX_BYTES else b"", format=one.format)
        for one in images[:MAX_PICTURES]
    )


def thumbnail(image: types_pb2.Image) -> str | None:
    """The picture as a data URL of a small JPEG, made from its pixels, so that nothing of the client's file is left.
    None for a picture that is too large or broken. The call takes up to a second, so it belongs into a thread."""
    try:
        width, height = size_of(image.data, image.format, field="")
        if width * height > _MAX_PIXELS:
            return None
        picture = decode(image.data, image.format, field="")
    except (ServiceError, MemoryError):
        return None
    picture.thumbnail((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=75)
    data = file.getvalue()
    return f"data:image/jpeg;base64,{b64encode(data).decode()}" if len(data) <= MAX_THUMBNAIL_BYTES else None
