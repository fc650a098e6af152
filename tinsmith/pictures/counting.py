"""The number of tokens that a model's own processor makes of a picture, from the picture's size alone.

A rule holds the settings of one kind of processor. The gateway makes the trainer's rule again from its name and its
settings, so a rule needs no library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from tinsmith.pictures.headers import refusal

_MAX_RATIO = 200
"""Largest ratio of the sides that the processors of Qwen's models take."""

Size = tuple[int, int]
"""Width and height, in pixels."""


class Counting(Protocol):
    """A rule by which a processor scales pictures, and the number of tokens that it makes of a picture. A dataclass of
    integers."""

    rule: ClassVar[str]

    def scaled(self, width: int, height: int, *, field: str) -> Size:
        """Size to which the processor scales a picture. Raises InvalidRequest, naming `field`, for a picture that it
        does not take."""
        ...

    def tokens(self, width: int, height: int, *, field: str) -> int:
        """Number of tokens of a picture of this size, which a rotation by 90 degrees does not change, except with
        `Rows`. Raises as `scaled` does."""
        ...

    def grid(self, scaled: Size) -> tuple[int, int] | None:
        """Rows and columns of the tokens that get features of a scaled picture; None if they form no grid."""
        ...

    @property
    def most_tokens(self) -> int:
        """Upper bound of the number of tokens of a picture."""
        ...

    def examples(self) -> Sequence[Size]:
        """Sizes of two scaled pictures of few tokens, for checks."""
        ...

    def typical(self) -> Size:
        """Size of a scaled picture that takes a typical amount of memory for each of its tokens, for measurements."""
        ...


@dataclass(frozen=True, slots=True)
class ByArea:
    """Qwen2-VL to Qwen3.5, GLM-4.1V and later: a picture is scaled so that both sides are multiples of the merged
    patch's side and the number of pixels is within limits, and each merged patch becomes one token."""

    rule: ClassVar[str] = "area"
    patch_size: int
    """Side of a patch, in pixels."""
    merge_size: int
    """Side of the square of patches that becomes one token, in patches."""
    min_pixels: int
    max_pixels: int
    enlarges: int = 0
    """1 if a picture with a side shorter than the merged patch's is enlarged first, as by GLM's processor; else 0."""

    @classmethod
    def of(cls, processor: Any) -> ByArea:
        """The settings of an image processor of transformers."""
        size = processor.size
        return cls(processor.patch_size, processor.merge_size, size["shortest_edge"], size["longest_edge"])

    @property
    def side(self) -> int:
        """Side of the square that becomes one token, in pixels."""
        return self.patch_size * self.merge_size

    def scaled(self, width: int, height: int, *, field: str) -> Size:
        side, shorter = self.side, min(width, height)
        if max(width, height) > _MAX_RATIO * shorter:
            raise refusal(field, f"has {width} x {height} pixels; one side may be at most {_MAX_RATIO} times the other")
        if self.enlarges and shorter < side:
            width, height = int(width * (side / shorter)), int(height * (side / shorter))
        # This is `smart_resize` of transformers' qwen2_vl image processor. Both round halves to the even number.
        across, down = round(width / side) * side, round(height / side) * side
        if across * down > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            across, down = (max(side, math.floor(one / factor / side) * side) for one in (width, height))
        elif across * down < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            across, down = (math.ceil(one * factor / side) * side for one in (width, height))
        return across, down

    def tokens(self, width: int, height: int, *, field: str) -> int:
        rows, columns = self.grid(self.scaled(width, height, field=field))
        return rows * columns

    def grid(self, scaled: Size) -> tuple[int, int]:
        return scaled[1] // self.side, scaled[0] // self.side

    @property
    def most_tokens(self) -> int:
        # A picture that is scaled down keeps a shorter side of one token, and has then a single row or column of them.
        return max(self.max_pixels // self.side**2, math.isqrt(_MAX_RATIO * self.max_pixels) // self.side)

    def examples(self) -> Sequence[Size]:
        # Rows and columns differ, so that exchanging them shows.
        return (3 * self.side, 2 * self.side), (2 * self.side, self.side)

    def typical(self) -> Size:
        return 8 * self.side, 8 * self.side


@dataclass(frozen=True, slots=True)
class OneSize:
    """Gemma 3: every picture is scaled to one size, whatever its own proportions, and has the same number of tokens."""

    rule: ClassVar[str] = "one size"
    width: int
    height: int
    num_tokens: int

    def scaled(self, width: int, height: int, *, field: str) -> Size:
        return self.width, self.height

    def tokens(self, width: int, height: int, *, field: str) -> int:
        return self.num_tokens

    def grid(self, scaled: Size) -> None:
        return None

    @property
    def most_tokens(self) -> int:
        return self.num_tokens

    def examples(self) -> Sequence[Size]:
        return ((self.width, self.height),) * 2

    def typical(self) -> Size:
        return self.width, self.height


@dataclass(frozen=True, slots=True)
class Filling:
    """Gemma 4: a picture keeps its proportions and is scaled to the largest number of merged patches that is allowed.
    Each merged patch becomes one token."""

    rule: ClassVar[str] = "filling"
    side: int
    """Side of the square that becomes one token, in pixels."""
    max_tokens: int

    def scaled(self, width: int, height: int, *, field: str) -> Size:
        # This is `get_aspect_ratio_preserving_size` of transformers' gemma4 image processor.
        side = self.side
        factor = math.sqrt(self.max_tokens * side**2 / (width * height))
        across, down = (math.floor(factor * one / side) * side for one in (width, height))
        longest = self.max_tokens * side
        if across == 0 and down == 0:
            raise refusal(field, f"has {width} x {height} pixels, which leave no token")
        if down == 0:
            across, down = min(width // height * side, longest), side
        elif across == 0:
            across, down = side, min(height // width * side, longest)
        return across, down

    def tokens(self, width: int, height: int, *, field: str) -> int:
        rows, columns = self.grid(self.scaled(width, height, field=field))
        return rows * columns

    def grid(self, scaled: Size) -> tuple[int, int]:
        return scaled[1] // self.side, scaled[0] // self.side

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    def examples(self) -> Sequence[Size]:
        return (3 * self.side, 2 * self.side), (2 * self.side, self.side)

    def typical(self) -> Size:
        side = math.isqrt(self.max_tokens) * self.side  # the tower pads pictures of fewer tokens
        return side, side


@dataclass(frozen=True, slots=True)
class Bounded:
    """Kimi K2.5: a picture is scaled down, never up, until the number of its patches and its sides are within limits,
    and is filled up on the right and below to whole merged patches, each of which becomes one token."""

    rule: ClassVar[str] = "bounded"
    patch_size: int
    """Side of a patch, in pixels."""
    merge_size: int
    """Side of the square of patches that becomes one token, in patches."""
    max_patches: int
    """Most whole patches. Patches that the picture covers only in part do not count."""
    max_side: int
    """Most patches on one side."""

    @property
    def side(self) -> int:
        """Side of the square that becomes one token, in pixels."""
        return self.patch_size * self.merge_size

    def scaled(self, width: int, height: int, *, field: str) -> Size:
        # This is `navit_resize` of transformers' kimi_k25 image processor.
        longest = self.max_side * self.patch_size
        patches = max(1, width // self.patch_size) * max(1, height // self.patch_size)
        factor = min(1.0, math.sqrt(self.max_patches / patches), longest / height, longest / width)
        across, down = (min(max(1, int(one * factor)), longest) for one in (width, height))
        return across, down

    def tokens(self, width: int, height: int, *, field: str) -> int:
        rows, columns = self.grid(self.scaled(width, height, field=field))
        return rows * columns

    def grid(self, scaled: Size) -> tuple[int, int]:
        return -(-scaled[1] // self.side), -(-scaled[0] // self.side)

    @property
    def most_tokens(self) -> int:
        # A side with p whole patches is shorter than p + 1 patches. So a picture with r rows of tokens has more than
        # (r - 1) * merge_size - 1 whole patches on this side, and max_patches bounds those on the other side.
        most = -(-self.max_side // self.merge_size)
        other = (self.max_patches / max(1, rows * self.merge_size - 1) for rows in range(most))
        return max(
            rows * min(most, math.ceil((patches + 1) / self.merge_size)) for rows, patches in enumerate(other, start=1)
        )

    def examples(self) -> Sequence[Size]:
        return (3 * self.side - 1, 2 * self.side), (2 * self.side, self.side)

    def typical(self) -> Size:
        return 8 * self.side, 8 * self.side


@dataclass(frozen=True, slots=True)
class Rows:
    """Mistral 3: a picture is scaled down, never up, until no side is longer than a limit, and then to whole merged
    patches, each of which becomes one token. One more token, which stands for no patch, ends each row."""

    rule: ClassVar[str] = "rows"
    side: int
    """Side of the square that becomes one token, in pixels."""
    longest: int
    """Longest side of a picture, in pixels, before it is scaled to whole merged patches."""

    def scaled(self, width: int, height: int, *, field: str) -> Size:
        # This is `get_resize_output_image_size` of transformers' pixtral image processor.
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
            if not width or not height:
                raise refusal(field, "is so long that its short side has no pixel left when it is scaled down")
        return -(-width // self.side) * self.side, -(-height // self.side) * self.side

    def tokens(self, width: int, height: int, *, field: str) -> int:
        rows, columns = self.grid(self.scaled(width, height, field=field))
        return rows * (columns + 1)

    def grid(self, scaled: Size) -> tuple[int, int]:
        return scaled[1] // self.side, scaled[0] // self.side

    @property
    def most_tokens(self) -> int:
        most = -(-self.longest // self.side)
        return most * (most + 1)

    def examples(self) -> Sequence[Size]:
        return (3 * self.side, 2 * self.side), (2 * self.side, self.side)

    def typical(self) -> Size:
        return 8 * self.side, 8 * self.side


@dataclass(frozen=True, slots=True)
class Cropped(OneSize):
    """LLaVA: a picture is scaled until its shorter side has the length `shorter`, and cropped to `width` x `height`
    pixels in its middle. Every picture has the same number of tokens."""

    rule: ClassVar[str] = "cropped"
    shorter: int
    """Length of the shorter side, in pixels."""

    def scaled(self, width: int, height: int, *, field: str) -> Size:
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise refusal(field, f"has {width} x {height} pixels; one side may be at most {_MAX_RATIO} times the other")
        # This is `get_resize_output_image_size` of transformers' image_transforms.
        longer = int(self.shorter * max(width, height) / min(width, height))
        return (self.shorter, longer) if width <= height else (longer, self.shorter)


@dataclass(frozen=True, slots=True)
class Tiled:
    """InternVL: a picture is scaled to the rows and columns of tiles that suit its proportions best, and cut into these
    tiles. If there are several, one more tile shows the whole picture. A scaled picture has all its tiles in one
    column."""

    rule: ClassVar[str] = "tiled"
    width: int
    height: int
    """Size of a tile, in pixels."""
    num_tokens: int
    """Tokens of a tile."""
    min_tiles: int
    max_tiles: int
    """Bounds of the number of tiles, without the one that shows the whole picture."""

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tiles of a picture."""
        # This is `get_optimal_tiled_canvas` of transformers' got_ocr2 image processor.
        best, difference = (1, 1), math.inf
        for columns, rows in self._arrangements():
            found = abs(width / height - columns / rows)
            # Between two arrangements that suit equally well, the one with more tiles is taken, unless the picture has
            # at most half as many pixels as these tiles.
            larger = width * height > 0.5 * self.width * self.height * columns * rows
            if found < difference or (found == difference and larger):
                best, difference = (rows, columns), found
        return best

    def _arrangements(self) -> Sequence[tuple[int, int]]:
        """Pairs of columns and rows whose number of tiles is within the bounds, in rising order of that number."""
        sides = range(1, self.max_tiles + 1)
        within = range(self.min_tiles, self.max_tiles + 1)
        return sorted(((x, y) for x in sides for y in sides if x * y in within), key=lambda one: one[0] * one[1])

    def scaled(self, width: int, height: int, *, field: str) -> Size:
        rows, columns = self.tiles(width, height)
        count = rows * columns
        return self.width, self.height * (count + (count > 1))

    def tokens(self, width: int, height: int, *, field: str) -> int:
        return self.scaled(width, height, field=field)[1] // self.height * self.num_tokens

    def grid(self, scaled: Size) -> tuple[int, int]:
        return scaled[1] // self.height, self.num_tokens

    @property
    def most_tokens(self) -> int:
        return self.num_tokens * (self.max_tiles + (self.max_tiles > 1))

    def examples(self) -> Sequence[Size]:
        return (self.width, 3 * self.height), (self.width, self.height)

    def typical(self) -> Size:
        return self.width, self.height


_RULES: Mapping[str, Callable[..., Counting]] = {
    one.rule: one for one in (ByArea, OneSize, Filling, Bounded, Rows, Cropped, Tiled)
}


def settings_of(counting: Counting) -> dict[str, int]:
    """The settings of a rule, for a message."""
    return asdict(counting)  # type: ignore[call-overload]  # every rule is a dataclass


def counting_of(rule: str, settings: Mapping[str, int]) -> Counting:
    """The rule with this name and these settings. Raises KeyError for a name, and TypeError for settings, that this
    release does not know."""
    return _RULES[rule](**settings)
