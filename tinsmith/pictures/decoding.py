"""Decodes a client's PNG or JPEG within limits that are checked before a pixel is decoded."""

from __future__ import annotations

import io
import logging
import threading

from PIL import Image, ImageOps

from tinsmith.errors import ServiceError
from tinsmith.pictures.headers import refusal, size_of

logger = logging.getLogger(__name__)

_ONE_AT_A_TIME = threading.Lock()
"""Bounds the memory of decoding to that of one picture (headers.py), however many requests bring pictures."""


def decode(data: bytes, file_format: str, *, field: str) -> Image.Image:
    """The picture as RGB, 8 bits for each channel, rotated as its metadata ask for. Transparency is dropped, as
    transformers' processors do. To be called on a thread and not on the event loop: it may take seconds.

    Raises InvalidRequest, naming `field` and the reason.
    """
    size = size_of(data, file_format, field=field)
    with _ONE_AT_A_TIME:
        try:
            with Image.open(io.BytesIO(data), formats=[file_format]) as opened:
                if opened.size != size:
                    raise refusal(field, f"names two sizes, {size} and {opened.size}")
                opened.load()
                return _rgb(ImageOps.exif_transpose(opened))
        except (ServiceError, MemoryError):
            raise
        except Exception as error:  # Pillow raises about ten classes for broken files, SyntaxError among them
            logger.info("%s: %s: %s", field, type(error).__name__, error)
            raise refusal(field, f"is broken: {_reason(error)}") from None


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits of grey, of which Pillow's own conversion would keep the lower 8
        picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return picture.convert("RGB")


def _reason(error: Exception) -> str:
    """The text of an error, at most 200 characters, up to the first "<", behind which Pillow shows an object's address.
    The name of the error's class if the text is empty."""
    text = str(error).partition("<")[0].strip()
    return text[:200] or type(error).__name__
