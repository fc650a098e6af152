"""The number of tokens that a model's own processor makes of a picture, from the picture's size alone.

The processors of Qwen2-VL, 2.5-VL, 3-VL, 3.5 and their relatives: a picture is scaled so that both sides are multiples
of the merged patch's side and the number of pixels is within limits, and each merged patch becomes one token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tinsmith.pictures.headers import refusal

_MAX_RATIO = 200
"""Largest ratio of the sides that these processors take."""


@dataclass(frozen=True, slots=True)
class Counting:
    """The settings of a processor on which the number of tokens depends."""

    patch_size: int
    """Side of a patch, in pixels."""
    merge_size: int
    """Side of the square of patches that becomes one token, in patches."""
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, processor: Any) -> Counting:
        """The settings of an image processor of transformers."""
        size = processor.size
        return cls(processor.patch_size, processor.merge_size, size["shortest_edge"], size["longest_edge"])

    @property
    def side(self) -> int:
        """Side of the square that becomes one token, in pixels."""
        return self.patch_size * self.merge_size

    def scaled(self, width: int, height: int, *, field: str) -> tuple[int, int]:
        """Width and height to which the processor scales a picture, in pixels.

        Raises InvalidRequest, naming `field`, for a picture that is too long for its width.
        """
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise refusal(field, f"has {width} x {height} pixels; one side may be at most {_MAX_RATIO} times the other")
        side = self.side
        # As `smart_resize` of transformers' qwen2_vl image processor, whose rounding is Python's, to even numbers.
        across, down = round(width / side) * side, round(height / side) * side
        if across * down > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            across, down = (max(side, math.floor(one / factor / side) * side) for one in (width, height))
        elif across * down < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            across, down = (math.ceil(one * factor / side) * side for one in (width, height))
        return across, down

    def tokens(self, width: int, height: int, *, field: str) -> int:
        """Number of tokens of a picture of this size, which a rotation by 90 degrees does not change. Raises as
        `scaled` does."""
        across, down = self.scaled(width, height, field=field)
        return across // self.side * (down // self.side)
