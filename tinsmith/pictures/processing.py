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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tinsmith.errors import InvalidRequest
from tinsmith.pictures.counting import Counting
from tinsmith.pictures.decoding import decode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that has been scaled for the base model."""

    pixels: npt.NDArray[np.uint8]
    """RGB, [height, width, 3]. About 3 kB for each token: the patches, in float32, would be 24 kB."""
    rows: int
    """Rows of tokens."""
    columns: int
    """Tokens in a row."""
    digest: bytes
    """SHA-256 of the scaled pixels and their shape. Equal pictures of different tenants share it, so a hash for which
    somebody could make two pictures would show one of them the other's."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


class Processor:
    """The image processor in a base model's files. Thread safe."""

    def __init__(self, processor: Qwen2VLImageProcessorPil) -> None:
        self._processor: Any = processor
        self.counting = Counting.of(processor)

    @classmethod
    def load(cls, path: str | Path) -> Processor:
        """The processor in a folder or of a Hugging Face id. Raises ValueError, with the reason, if there is none of a
        kind that is known here. Code that comes with a model is never run."""
        try:
            processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=False, backend="pil")
        except (OSError, ValueError, KeyError, ImportError) as error:
            logger.info("%s: no image processor: %s", path, error)
            raise ValueError("its files hold no image processor (preprocessor_config.json)") from None
        if type(processor) is not Qwen2VLImageProcessorPil:
            raise ValueError(
                f"its image processor, {type(processor).__name__}, is not known here; known are those of Qwen2-VL to "
                "Qwen3.5"
            )
        return cls(processor)

    def picture(self, data: bytes, file_format: str, *, expected_tokens: int | None, field: str) -> Picture:
        """Decodes and scales a PNG or JPEG. For a thread, not for an event loop: it may take seconds.

        `expected_tokens`: the client's own count; None if it gave none. Raises InvalidRequest, naming `field` and the
        reason, for a picture that cannot be decoded, or that has another number of tokens.
        """
        decoded = decode(data, file_format, field=field)
        width, height = self.counting.scaled(*decoded.size, field=field)
        side = self.counting.side
        rows, columns = height // side, width // side
        check_expected(rows * columns, expected_tokens, field=field)
        # The processor's own scaling, which Pillow does in 8 bits: the patches of the result are bit for bit its own.
        pixels = np.asarray(decoded.resize((width, height), self._processor.resample))
        digest = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
        return Picture(pixels, rows, columns, digest)

    def patches(self, pictures: Sequence[Picture]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """The patches of all pictures, [patches, features of one], and each one's frames, rows and columns of
        patches, [pictures, 3]."""
        made = self._processor(
            images=[picture.pixels for picture in pictures],
            do_resize=False,
            input_data_format="channels_last",
            return_tensors="np",
        )
        return made["pixel_values"], made["image_grid_thw"]


def check_expected(num_tokens: int, expected_tokens: int | None, *, field: str) -> None:
    """Raises InvalidRequest when a client expects another number of tokens than its picture has."""
    if expected_tokens is not None and expected_tokens != num_tokens:
        raise InvalidRequest(
            f"{field}.expected_tokens: expected {expected_tokens} tokens, got {num_tokens} from image",
            field=f"{field}.expected_tokens",
        )
