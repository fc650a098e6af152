"""The image processor of Kimi K2.5 and K2.6 with Pillow. transformers has one for torchvision only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

from tinsmith.pictures.counting import Bounded


class _KimiImagesKwargs(ImagesKwargs, total=False):
    max_patches: int
    patch_size: int
    merge_size: int


class Kimi_K25ImageProcessorPil(PilBackend):
    """Scales a picture down to at most `max_patches` patches and `size` patches on a side, adds black pixels on the
    right and below until its patches can be merged, and gives these patches, [P, 3, patch_size, patch_size]. The class
    is named as transformers names its processors that use Pillow."""

    do_resize = True
    resample = PILImageResampling.BICUBIC
    size = {"max_height": 512, "max_width": 512}  # noqa: RUF012  # in patches; as transformers has it
    max_patches = 16384
    do_rescale = True
    do_normalize = True
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    do_convert_rgb = True
    patch_size = 14
    merge_size = 2
    valid_kwargs = _KimiImagesKwargs
    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012

    def __init__(self, *, media_proc_cfg: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """`media_proc_cfg`: the settings as the model's publisher writes them. Raises KeyError if one is missing."""
        self.fixed_output_tokens: int | None = None
        """Fixed number of tokens of each picture; None without one. Only the publisher's own code supports a fixed
        number."""
        if media_proc_cfg is not None:
            settings |= _of_publisher(media_proc_cfg)
            self.fixed_output_tokens = media_proc_cfg.get("fixed_output_tokens")
        super().__init__(**settings)

    def _preprocess(  # pyright: ignore[reportIncompatibleMethodOverride]  # as in transformers' own processors
        self, images: Sequence[npt.NDArray[np.uint8]], *, return_tensors: str | None, **settings: Any
    ) -> BatchFeature:
        """`images`: [3, height, width] each."""
        side, merged = settings["patch_size"], settings["merge_size"]
        counting = Bounded(side, merged, settings["max_patches"], settings["size"]["max_height"])
        patches: list[npt.NDArray[Any]] = []
        grids: list[list[int]] = []
        for image in images:
            if settings["do_resize"]:
                width, height = counting.scaled(image.shape[2], image.shape[1], field="images")
                image = self.resize(image, SizeDict(height=height, width=width), settings["resample"])
            _, height, width = image.shape
            rows, columns = (merged * count for count in counting.grid((width, height)))
            image = np.pad(image, ((0, 0), (0, rows * side - height), (0, columns * side - width)))
            if settings["do_rescale"]:
                image = self.rescale(image, settings["rescale_factor"])
            if settings["do_normalize"]:
                image = self.normalize(image, settings["image_mean"], settings["image_std"])
            cut = image.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
            patches.append(cut.reshape(rows * columns, 3, side, side))
            grids.append([1, rows, columns])
        data = {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, np.int64)}
        return BatchFeature(data=data, tensor_type=return_tensors)


def _of_publisher(settings: Mapping[str, Any]) -> dict[str, Any]:
    side = settings["patch_limit_on_one_side"]
    return {
        "size": {"max_height": side, "max_width": side},
        "max_patches": settings["in_patch_limit"],
        "patch_size": settings["patch_size"],
        "merge_size": settings["merge_kernel_size"],
        "image_mean": settings["image_mean"],
        "image_std": settings["image_std"],
    }
