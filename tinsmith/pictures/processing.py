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
    """Ids of the tokens that stand for it: those of the processor's `picture_token` get its features, and others, which
    end rows of them, keep their embeddings."""
    digest: bytes
    """SHA-256 of the scaled pixels and their shape. Equal pictures of different tenants share it, so a hash for which
    somebody could make two pictures would show one of them the other's."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its tokens, where positions count both; None where they are numbered as those of text."""
    sees_ahead: bool = False
    """Whether its tokens see each other in both directions, so that all of them have to be computed at once."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.size


class Processor:
    """The image processor in a base model's files. Thread safe."""

    def __init__(self, processor: Any, family: Family, config: Any, *, row_ends: tuple[int, int] | None = None) -> None:
        """`config`: the model's. `row_ends`: ids of the family's. Raises ValueError, with the reason, for settings that
        are not supported."""
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
        """The processor in a folder or of a Hugging Face id. Raises ValueError, with the reason, if there is none of
        the family's kind. Code that comes with a model is never run."""
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
        """Decodes and scales a PNG or JPEG. For a thread, not for an event loop: it may take seconds.

        `expected_tokens`: the client's own count; None if it gave none. Raises InvalidRequest, naming `field` and the
        reason, for a picture that cannot be decoded, or that has another number of tokens.
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
        # The processor's own scaling, which Pillow does in 8 bits: the patches of the result are bit for bit its own.
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
        """The processor's output for the pictures: patches or pixels, and what else the tower takes with them."""
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
    """Ids of two tokens of a model's vocabulary. Raises ValueError, with the reason, if it does not have them."""
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
