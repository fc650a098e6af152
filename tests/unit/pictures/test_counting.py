"""The number of tokens of a picture, against the processor of transformers."""

import random

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tinsmith.errors import InvalidRequest
from tinsmith.pictures.counting import ByArea, Counting, OneSize, counting_of, settings_of

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


@pytest.mark.parametrize("counting", [ByArea(4, 2, min_pixels=128, max_pixels=2048), OneSize(24, 24, num_tokens=9)])
def test_the_gateway_makes_the_trainers_rule_again(counting: Counting) -> None:
    assert counting_of(counting.rule, settings_of(counting)) == counting
    with pytest.raises(KeyError):
        counting_of("another", settings_of(counting))


def test_gemma_3_scales_every_picture_to_one_size() -> None:
    counting = OneSize(24, 24, num_tokens=9)
    assert counting.scaled(37, 21, field="c") == counting.scaled(1, 5000, field="c") == (24, 24)
    assert counting.tokens(37, 21, field="c") == 9
