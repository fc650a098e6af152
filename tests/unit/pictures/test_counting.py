"""The number of tokens of a picture, against the processor of transformers."""

import random
from functools import partial

import numpy as np
import pytest
import transformers
from transformers.image_transforms import get_resize_output_image_size as by_shorter_side
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil, smart_resize
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tinsmith.errors import InvalidRequest
from tinsmith.pictures.counting import (
    Bounded,
    ByArea,
    Counting,
    Cropped,
    Filling,
    OneSize,
    Rows,
    Tiled,
    counting_of,
    settings_of,
)
from tinsmith.pictures.families import FAMILIES

QWEN3_VL = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}


@pytest.mark.parametrize("settings", [{}, QWEN3_VL, {"size": {"shortest_edge": 1, "longest_edge": 40_000}}])
def test_pictures_count_as_transformers_processor_counts_them(settings: dict) -> None:
    processor = Qwen2VLImageProcessorPil(**settings)
    counting = ByArea.of(processor)
    generator = random.Random(0)
    sizes = [(1, 1), (1, 200), (200, 1), (5792, 5792), (28, 28), (42, 42), (14, 70)]
    sizes += [(generator.randrange(1, 900), generator.randrange(1, 900)) for _ in range(500)]
    sizes += [(generator.randrange(900, 6000), generator.randrange(900, 6000)) for _ in range(500)]
    num_refused = 0
    for width, height in sizes:
        try:
            patches = processor.get_number_of_image_patches(height, width)
        except ValueError:
            num_refused += 1
            with pytest.raises(InvalidRequest, match=f"prompt.0..data: the picture has {width} x {height} pixels; one"):
                counting.tokens(width, height, field="prompt[0]")
            continue
        assert counting.tokens(width, height, field="prompt[0]") == patches // processor.merge_size**2
        assert counting.tokens(height, width, field="prompt[0]") == patches // processor.merge_size**2
    assert num_refused < len(sizes) / 10


def sizes() -> list[tuple[int, int]]:
    """Widths and heights of many pictures."""
    generator = random.Random(1)
    some = [(1, 1), (5, 40), (27, 29), (1, 200), (3000, 20), (5792, 5792), (48, 48), (2, 380)]
    return some + [(generator.randrange(1, 3000), generator.randrange(1, 3000)) for _ in range(300)]


def test_glm_and_gemma_4_scale_as_transformers_processors_do() -> None:
    glm = FAMILIES["glm4v"].counting(Glm4vImageProcessorPil(), None)
    gemma = FAMILIES["gemma4"].counting(Gemma4ImageProcessorPil(), None)
    num_refused = 0
    for width, height in sizes():
        glms = partial(smart_resize, 2, height, width, max_pixels=28 * 28 * 15000)
        gemmas = partial(get_aspect_ratio_preserving_size, height, width, 16, 280 * 9, 3)
        for counting, theirs, side in ((glm, glms, 28), (gemma, gemmas, 48)):
            try:
                down, across = theirs()
            except ValueError:
                num_refused += 1
                with pytest.raises(InvalidRequest, match=f"^c.data: the picture has {width} x {height} pixels"):
                    counting.scaled(width, height, field="c")
                continue
            assert counting.scaled(width, height, field="c") == (across, down)
            assert counting.tokens(width, height, field="c") == across // side * (down // side)
            assert counting.grid((across, down)) == (down // side, across // side)
    assert num_refused < 20


@pytest.mark.parametrize(
    "counting",
    [
        Bounded(4, 2, max_patches=64, max_side=512),
        Filling(8, max_tokens=70),
        ByArea(4, 2, min_pixels=128, max_pixels=2048),
        OneSize(24, 24, num_tokens=9),
        Rows(8, longest=64),
        Cropped(12, 12, num_tokens=9, shorter=12),
        Tiled(16, 16, num_tokens=4, min_tiles=1, max_tiles=3),
    ],
)
def test_the_gateway_makes_the_trainers_rule_again(counting: Counting) -> None:
    assert counting_of(counting.rule, settings_of(counting)) == counting
    with pytest.raises(KeyError):
        counting_of("another", settings_of(counting))


@pytest.mark.parametrize("longest", [1540, 1024])
def test_mistral_3_scales_as_transformers_processor_does(longest: int) -> None:
    config = transformers.Mistral3Config()
    counting = FAMILIES["mistral3"].counting(PixtralImageProcessorPil(size={"longest_edge": longest}), config)
    for width, height in sizes():
        pixels = np.broadcast_to(np.uint8(0), (height, width, 3))
        down, across = get_resize_output_image_size(pixels, longest, 28, "channels_last")
        if not down * across:
            with pytest.raises(
                InvalidRequest, match=r"^c.data: the picture is so long that its short side has no pixel"
            ):
                counting.scaled(width, height, field="c")
            continue
        assert counting.scaled(width, height, field="c") == (across, down)
        assert counting.tokens(width, height, field="c") == down // 28 * (across // 28 + 1)


def test_llava_scales_as_transformers_processor_does() -> None:
    processor = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    counting = FAMILIES["llava"].counting(processor, transformers.LlavaConfig())
    for width, height in sizes():
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(InvalidRequest, match=r"^c.data: the picture has .* one side may be at most 200 times"):
                counting.scaled(width, height, field="c")
            continue
        pixels = np.broadcast_to(np.uint8(0), (height, width, 3))
        down, across = by_shorter_side(pixels, 336, default_to_square=False, input_data_format="channels_last")
        assert counting.scaled(width, height, field="c") == (across, down)
        assert counting.tokens(width, height, field="c") == 576


def test_internvl_cuts_as_transformers_processor_does() -> None:
    processor = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    counting = FAMILIES["internvl"].counting(processor, transformers.InternVLConfig())
    for width, height in [*sizes(), (896, 896), (633, 633), (634, 634), (1344, 448)]:
        tiles = processor.get_number_of_image_patches(height, width)
        assert counting.scaled(width, height, field="c") == (448, 448 * tiles)
        assert counting.tokens(width, height, field="c") == 256 * tiles


def test_gemma_3_scales_every_picture_to_one_size() -> None:
    counting = OneSize(24, 24, num_tokens=9)
    assert counting.scaled(37, 21, field="c") == counting.scaled(1, 5000, field="c") == (24, 24)
    assert counting.tokens(37, 21, field="c") == 9


@pytest.mark.parametrize(
    "counting",
    [
        ByArea(14, 2, 65536, 16777216),
        ByArea(4, 2, 2 * 64, 32 * 64),
        ByArea(4, 2, 4 * 64, 4 * 64, enlarges=1),
        OneSize(24, 24, 9),
        Filling(8, 70),
        Filling(48, 280),
        Bounded(14, 2, 16384, 512),
        Bounded(4, 2, 64, 512),
        Bounded(4, 2, 64, 20),
        Rows(28, 1540),
        Cropped(336, 336, 576, 336),
        Tiled(448, 448, 256, 1, 12),
        Tiled(448, 448, 256, 1, 1),
        Rows(28, 1024),
    ],
)
def test_no_picture_has_more_tokens_than_are_foreseen(counting: Counting) -> None:
    found = []
    for width, height in [*sizes(), (4000, 20), (200, 1), (1, 200), (1600, 8), (3999, 40), (100_000, 1)]:
        try:
            found.append(counting.tokens(width, height, field=""))
        except InvalidRequest:
            continue
    assert counting.most_tokens / 2 < max(found) <= counting.most_tokens
