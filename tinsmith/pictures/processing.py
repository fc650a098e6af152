"""A client's pictures as the base model's own processor makes them: scaled, and cut into the patches of its tower."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoImageProcessor, AutoTokenizer

from tinsmith.errors import InvalidRequest
from tinsmith.pictures.counting import Tiled
from tinsmith.pictures.decoding import decode
from tinsmith.pictures.families import Family
from tinsmith.pictures.headers import refusal, size_of
from tinsmith.pictures.kimi import Kimi_K25ImageProcessorPil

logger = logging.getLogger(__name__)

_OURS = {Kimi_K25ImageProcessorPil.__name__: Kimi_K25ImageProcessorPil}
"""Image processors that transformers does not have, by name."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that has been scaled for the base model."""

    pixels: npt.NDArray[np.uint8]
    """RGB, [height, width, 3]. About 3 kB for each token of Qwen's models: the patches, in float32, would be 24 kB."""
    tokens: npt.NDArray[np.int32]
    """Ids of the tokens that stand for the picture. Tokens with the id `Processor.picture_token` get the features of
    the picture. The other tokens end rows, and keep their own embeddings."""
    digest: bytes
    """SHA-256 of the scaled pixels and their shape. Features are kept under this digest for all tenants together. If
    somebody could make two pictures with one digest, a tenant could get the features of another tenant's picture."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the tokens, if the model's positions count both; None if positions are numbered as in
    text."""
    sees_ahead: bool = False
    """Whether the picture's tokens see each other in both directions, so that all of them must be computed at once."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.size


class Processor:
    """The image processor in a base model's files. Thread safe."""

    def __init__(self, processor: Any, family: Family, config: Any, *, row_ends: tuple[int, int] | None = None) -> None:
        """`config`: the model's configuration. `row_ends`: ids of the tokens that `family.row_ends` names. Raises
        ValueError, with the reason, for settings that are not supported."""
        self._processor = processor
        self.family = family
        self.counting = family.counting(processor, config)
        self.sees_ahead = family.sees_ahead(config)
        self.in_chats = family.in_chats(config)
        self.picture_token: int = config.image_token_id
        """Id of the tokens that get features of a picture."""
        self._row_ends = row_ends

    @classmethod
    def load(cls, path: str | Path, family: Family, config: Any) -> Processor:
        """The image processor in the model's files. `path`: a folder or a Hugging Face id. Raises ValueError, with the
        reason, if the files hold no processor of the family's class. Code that comes with a model is never run."""
        try:
            if family.processor in _OURS:
                processor: Any = _OURS[family.processor].from_pretrained(path)
            else:
                processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=False, backend="pil")
        except (OSError, ValueError, KeyError, ImportError) as error:
            logger.info("%s: no image processor: %s", path, error)
            raise ValueError("its files hold no image processor (preprocessor_config.json)") from None
        if type(processor).__name__ != family.processor:
            raise ValueError(
                f"its image processor, {type(processor).__name__}, is not known here; {family.name} is known with "
                f"{family.processor}"
            )
        ends = None if family.row_ends is None else _ids_of(path, family.row_ends)
        return cls(processor, family, config, row_ends=ends)

    def picture(self, data: bytes, file_format: str, *, expected_tokens: int | None, field: str) -> Picture:
        """Decodes and scales a PNG or JPEG. To be called on a thread and not on the event loop: it may take seconds.

        `expected_tokens`: the number of tokens that the client has counted; None if it gave none. Raises
        InvalidRequest, naming `field` and the reason, for a picture that cannot be decoded, or that has another number
        of tokens.
        """
        decoded = decode(data, file_format, field=field)
        num_tokens = self.counting.tokens(*decoded.size, field=field)
        if num_tokens != self.counting.tokens(*size_of(data, file_format, field=field), field=field):
            raise refusal(
                field,
                "is rotated by its metadata (EXIF), which changes its number of tokens in this base model; rotate its "
                "pixels and leave the metadata out",
            )
        check_expected(num_tokens, expected_tokens, field=field)
        # Pillow scales here as in the processor, in 8 bits, so the patches are bit-equal to the processor's own.
        scaled = partial(decoded.resize, resample=self._processor.resample)
        if not isinstance(self.counting, Tiled):
            return self.of_pixels(np.asarray(scaled(self.counting.scaled(*decoded.size, field=field))))
        across, down = self.counting.width, self.counting.height
        rows, columns = self.counting.tiles(*decoded.size)
        canvas = np.asarray(scaled((columns * across, rows * down)))
        tiles = canvas.reshape(rows, down, columns, across, 3).swapaxes(1, 2).reshape(-1, across, 3)
        whole = [np.asarray(scaled((across, down)))] if rows * columns > 1 else []
        return self.of_pixels(np.concatenate([tiles, *whole]))

    def of_pixels(self, pixels: npt.NDArray[np.uint8]) -> Picture:
        """The picture with these scaled pixels, [height, width, 3]."""
        height, width = pixels.shape[:2]
        grid = self.counting.grid((width, height))
        return Picture(
            pixels,
            tokens=self._tokens((width, height), grid),
            digest=hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest(),
            grid=grid if self.family.grid else None,
            sees_ahead=bool(self.sees_ahead),
        )

    def _tokens(self, size: tuple[int, int], grid: tuple[int, int] | None) -> npt.NDArray[np.int32]:
        if grid is None:
            return np.full(self.counting.tokens(*size, field=""), self.picture_token, np.int32)
        tokens = np.full(grid, self.picture_token, np.int32)
        if self._row_ends is not None:
            tokens = np.pad(tokens, ((0, 0), (0, 1)), constant_values=self._row_ends[0])
            tokens[-1, -1] = self._row_ends[1]
        return tokens.reshape(-1)

    def arrays(self, pictures: Sequence[Picture]) -> dict[str, npt.NDArray[Any]]:
        """The image processor's output for the pictures: patches or pixels, and further arguments of the tower."""
        images = [picture.pixels for picture in pictures]
        if isinstance(self.counting, Tiled):
            images = [tile for one in images for tile in one.reshape(-1, self.counting.height, *one.shape[1:])]
        made = self._processor(
            images=images,
            do_resize=False,
            input_data_format="channels_last",
            return_tensors="np",
            **self.family.options,
        )
        return dict(made)


def _ids_of(path: str | Path, names: tuple[str, str]) -> tuple[int, int]:
    """Ids of two tokens of a model's vocabulary. Raises ValueError, with the reason, if one of them is missing."""
    try:
        vocabulary = AutoTokenizer.from_pretrained(path, trust_remote_code=False).get_vocab()
    except (OSError, ValueError, KeyError, ImportError) as error:
        logger.info("%s: no tokenizer: %s", path, error)
        raise ValueError(f"its files hold no tokenizer, which names the tokens {' and '.join(names)}") from None
    if missing := [name for name in names if name not in vocabulary]:
        raise ValueError(f"its tokenizer has no token {missing[0]}, which ends a row of a picture's tokens")
    return vocabulary[names[0]], vocabulary[names[1]]


def check_expected(num_tokens: int, expected_tokens: int | None, *, field: str) -> None:
    """Raises InvalidRequest when a client expects another number of tokens than its picture has."""
    if expected_tokens is not None and expected_tokens != num_tokens:
        raise InvalidRequest(
            f"{field}.expected_tokens: expected {expected_tokens} tokens, got {num_tokens} from image",
            field=f"{field}.expected_tokens",
        )
