"""Converts a model input from its form in the RPCs to token ids and pictures, for trainer and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.errors import InvalidRequest
from tinsmith.modeling.tower import PlacedPicture
from tinsmith.pictures.headers import size_of
from tinsmith.pictures.processing import Picture, Processor
from tinsmith.rpc import tensors
from tinsmith.v1 import types_pb2


def has_pictures(chunks: Sequence[types_pb2.Chunk]) -> bool:
    """Whether an input has pictures. Decoding them takes seconds, so `model_input` runs on a thread then, and not on
    the event loop."""
    return any(chunk.HasField("image") for chunk in chunks)


def model_input(
    chunks: Sequence[types_pb2.Chunk], *, processor: Processor | None, why_no_pictures: str, max_tokens: int, field: str
) -> tuple[npt.NDArray[np.int32], tuple[PlacedPicture, ...]]:
    """The token ids [T] of an input, and its pictures in the order of their places.

    `processor`: the base model's image processor; None if pictures are not supported, for the reason `why_no_pictures`.
    `max_tokens`: most tokens of an input with pictures. The tokens are counted before any picture is decoded, so files
    of some kilobytes cannot fill the memory. Raises InvalidRequest, which names the chunk.
    """
    if not has_pictures(chunks):
        return tensors.text_tokens(chunks, field=field), ()
    num_tokens = _num_tokens(chunks, processor, field=field)
    if num_tokens > max_tokens:
        raise InvalidRequest(
            f"{field}: {num_tokens} tokens, with those of its pictures, are above {max_tokens}, the most that fit here",
            field=field,
        )
    pictures: list[PlacedPicture] = []
    parts: list[npt.NDArray[Any]] = []
    for index, chunk in enumerate(chunks):
        where = f"{field}[{index}]"
        if not chunk.HasField("image"):
            parts.append(tensors.chunk_tokens(chunk, field=where))
        elif processor is None:
            raise InvalidRequest(
                f"{where}: chunk kind 'image' is not supported by this base model ({why_no_pictures}); "
                "use encoded_text",
                field=where,
            )
        else:
            picture = _picture(chunk.image, processor, field=where)
            start = sum(part.size for part in parts)
            if picture.sees_ahead and pictures and pictures[-1].stop == start:
                raise InvalidRequest(
                    f"{where}: a picture follows another one at once; in this base model their tokens would see each "
                    "other as those of one picture. Put the tokens that end and begin a picture between them",
                    field=where,
                )
            pictures.append(PlacedPicture(start, picture))
            parts.append(picture.tokens)
    return np.concatenate(parts).astype(np.int32, copy=False), tuple(pictures)


def _num_tokens(chunks: Sequence[types_pb2.Chunk], processor: Processor | None, *, field: str) -> int:
    """Number of tokens of an input with pictures, which are counted by their headers. 0 without a processor, because no
    picture is decoded then. Raises InvalidRequest, which names the chunk, for a broken header."""
    if processor is None:
        return 0
    counting, num_tokens = processor.counting, 0
    for index, chunk in enumerate(chunks):
        where, image = f"{field}[{index}]", chunk.image
        num_tokens += len(chunk.encoded_text.tokens) // 4
        if chunk.HasField("image"):
            num_tokens += counting.tokens(*size_of(image.data, image.format, field=where), field=where)
    return num_tokens


def _picture(image: types_pb2.Image, processor: Processor, *, field: str) -> Picture:
    if image.HasField("override_dimensions"):
        where = f"{field}.override_dimensions"
        raise InvalidRequest(
            f"{where}: {image.override_dimensions.width} x {image.override_dimensions.height} cannot be applied; the "
            "base model's processor chooses the size. Leave it out, and scale the picture before sending it",
            field=where,
        )
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return processor.picture(image.data, image.format, expected_tokens=expected, field=field)
