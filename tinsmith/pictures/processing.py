"""A client's pictures as the base model's own processor makes them: scaled, and cut into the patches of its tower."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoImageProcessor

from tinsmith.errors import InvalidRequest
from tinsmith.pictures.decoding import decode
from tinsmith.pictures.families import Family
from tinsmith.pictures.kimi import Kimi_K25ImageProcessorPil

logger = logging.getLogger(__name__)

_OURS = {Kimi_K25ImageProcessorPil.__name__: Kimi_K25ImageProcessorPil}
"""Image processors that transformers does not have, by name."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that has been scaled for the base model."""

    pixels: npt.NDArray[np.uint8]
    """RGB, [height, width, 3]. About 3 kB for each token of Qwen's models: the patches, in float32, would be 24 kB."""
    num_tokens: int
    digest: bytes
    """SHA-256 of the scaled pixels and their shape. Equal pictures of different tenants share it, so a hash for which
    somebody could make two pictures would show one of them the other's."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its tokens, where positions count both; None where they are numbered as those of text."""
    sees_ahead: bool = False
    """Whether its tokens see each other in both directions, so that all of them have to be computed at once."""


class Processor:
    """The image processor in a base model's files. Thread safe."""

    def __init__(self, processor: Any, family: Family, config: Any) -> None:
        """`config`: the model's. Raises ValueError, with the reason, for settings that are not supported."""
        self._processor = processor
        self.family = family
        self.counting = family.counting(processor, config)
        self.sees_ahead = family.sees_ahead(config)
        self.in_chats = family.in_chats(config)
        self.picture_token: int = config.image_token_id
        """Id of the tokens that stand for a picture."""

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
        return cls(processor, family, config)

    def picture(self, data: bytes, file_format: str, *, expected_tokens: int | None, field: str) -> Picture:
        """Decodes and scales a PNG or JPEG. For a thread, not for an event loop: it may take seconds.

        `expected_tokens`: the client's own count; None if it gave none. Raises InvalidRequest, naming `field` and the
        reason, for a picture that cannot be decoded, or that has another number of tokens.
        """
        decoded = decode(data, file_format, field=field)
        size = self.counting.scaled(*decoded.size, field=field)
        check_expected(self.counting.tokens(*decoded.size, field=field), expected_tokens, field=field)
        # The processor's own scaling, which Pillow does in 8 bits: the patches of the result are bit for bit its own.
        return self.of_pixels(np.asarray(decoded.resize(size, self._processor.resample)))

    def of_pixels(self, pixels: npt.NDArray[np.uint8]) -> Picture:
        """The picture with these scaled pixels, [height, width, 3]."""
        height, width = pixels.shape[:2]
        grid = self.counting.grid((width, height))
        return Picture(
            pixels,
            num_tokens=self.counting.tokens(width, height, field="") if grid is None else grid[0] * grid[1],
            digest=hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest(),
            grid=grid if self.family.grid else None,
            sees_ahead=bool(self.sees_ahead),
        )

    def arrays(self, pictures: Sequence[Picture]) -> dict[str, npt.NDArray[Any]]:
        """The processor's output for the pictures: patches or pixels, and what else the tower takes with them."""
        made = self._processor(
            images=[picture.pixels for picture in pictures],
            do_resize=False,
            input_data_format="channels_last",
            return_tensors="np",
            **self.family.options,
        )
        return dict(made)


def check_expected(num_tokens: int, expected_tokens: int | None, *, field: str) -> None:
    """Raises InvalidRequest when a client expects another number of tokens than its picture has."""
    if expected_tokens is not None and expected_tokens != num_tokens:
        raise InvalidRequest(
            f"{field}.expected_tokens: expected {expected_tokens} tokens, got {num_tokens} from image",
            field=f"{field}.expected_tokens",
        )
