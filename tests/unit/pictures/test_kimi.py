"""Kimi K2.5's image processor with Pillow, against functions of transformers' own, whose module needs torchvision."""

import ast
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.pictures.test_counting import sizes
from tinsmith.pictures.counting import Bounded
from tinsmith.pictures.families import FAMILIES
from tinsmith.pictures.kimi import Kimi_K25ImageProcessorPil


def transformers_own(name: str) -> Callable[..., Any]:
    """A function or a method of transformers' module, cut out of its file."""
    spec = importlib.util.find_spec("transformers.models.kimi_k25")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], "image_processing_kimi_k25.py").read_text()
    found = next(one for one in ast.walk(ast.parse(source)) if getattr(one, "name", "") == name)
    names: dict[str, Any] = {"math": math, "torch": torch}
    exec(ast.unparse(found), names)
    return names[name]


@pytest.mark.parametrize(("max_patches", "max_side"), [(16384, 512), (64, 20)])
def test_a_picture_is_scaled_as_by_transformers(max_patches: int, max_side: int) -> None:
    processor = Kimi_K25ImageProcessorPil(max_patches=max_patches, size={"max_height": max_side, "max_width": max_side})
    counting = FAMILIES["kimi_k25"].counting(processor, None)
    theirs = transformers_own("navit_resize")
    for width, height in [*sizes(), (100_000, 1), (7, 30_000)]:
        (down, across), (padded_down, padded_across) = theirs(height, width, 14, 2, max_patches, max_side)
        assert counting.scaled(width, height, field="") == (across, down)
        assert counting.grid((across, down)) == (padded_down // 28, padded_across // 28)
        assert counting.tokens(width, height, field="") == padded_down // 28 * (padded_across // 28)


def test_settings_as_the_publisher_writes_them() -> None:
    settings = {
        "in_patch_limit": 65536, "patch_limit_on_one_side": 256, "patch_size": 16, "merge_kernel_size": 4,
        "image_mean": [0.4] * 3, "image_std": [0.3] * 3, "fixed_output_tokens": None,
    }  # fmt: skip
    processor = Kimi_K25ImageProcessorPil(media_proc_cfg=settings)
    counting = FAMILIES["kimi_k25"].counting
    assert counting(processor, None) == Bounded(16, 4, max_patches=65536, max_side=256)
    assert (processor.image_mean, processor.image_std) == ((0.4,) * 3, (0.3,) * 3)
    fixed = Kimi_K25ImageProcessorPil(media_proc_cfg={**settings, "fixed_output_tokens": 64})
    with pytest.raises(ValueError, match=r"every picture as many tokens .fixed_output_tokens., which is not supported"):
        counting(fixed, None)


def test_the_patches_of_a_picture_are_transformers_own() -> None:
    processor = Kimi_K25ImageProcessorPil(patch_size=4, max_patches=64)
    pixels = np.random.default_rng(0).integers(256, size=(21, 37, 3), dtype=np.uint8)
    ours = processor(images=[pixels], do_resize=False, input_data_format="channels_last", return_tensors="pt")
    padded = torch.zeros(3, 24, 40)  # to merged patches of 8 x 8 pixels
    padded[:, :21, :37] = torch.from_numpy(pixels).permute(2, 0, 1)
    (patches,), rows, columns = transformers_own("patchify")(processor, (padded[None] / 255 - 0.5) / 0.5, 4)
    assert ours["image_grid_thw"].tolist() == [[1, rows, columns]] == [[1, 6, 10]]
    torch.testing.assert_close(ours["pixel_values"], patches, rtol=0, atol=1e-6)


def test_sides_with_different_limits_are_refused() -> None:
    processor = Kimi_K25ImageProcessorPil(size={"max_height": 512, "max_width": 256})
    with pytest.raises(ValueError, match="another max_height than max_width, which is not supported"):
        FAMILIES["kimi_k25"].counting(processor, None)
