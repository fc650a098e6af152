"""Pictures in vLLM's workers, and the inputs that the tower takes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sampler_service.vllm.pictures import MODALITY, NUMBER, item_of, load_processor
from tinsmith.pictures.counting import ByArea, Cropped, Filling, OneSize, Rows, Tiled
from tinsmith.pictures.processing import Processor


@dataclass(frozen=True, slots=True)
class Form:
    """How the tower of a kind of model takes a picture in vLLM."""

    inputs: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]]
    """Function that makes the tower's inputs from the image processor's output for one picture, and from the id of the
    pictures' token."""
    stacked: Sequence[str] = ()
    """Names of the inputs that have no axis of pictures."""
    on_host: Sequence[str] = ()
    """Names of the inputs that vLLM reads on the host."""


_PIXELS = Form(lambda made, _: {"pixel_values": made["pixel_values"][0]}, stacked=["pixel_values"])
FORMS: Mapping[str, Form] = {
    ByArea.rule: Form(
        lambda made, _: {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"][0]},
        stacked=["image_grid_thw"],
        on_host=["image_grid_thw"],
    ),
    OneSize.rule: Form(
        lambda made, _: {"pixel_values": made["pixel_values"], "num_patches": torch.tensor(1)},
        stacked=["num_patches"],
        on_host=["num_patches"],
    ),
    Filling.rule: Form(
        lambda made, _: {
            "pixel_values": made["pixel_values"][0],
            "pixel_position_ids": made["image_position_ids"][0],
        },
        stacked=["pixel_values", "pixel_position_ids"],
    ),
    Rows.rule: _PIXELS,
    Cropped.rule: _PIXELS,
    Tiled.rule: Form(
        lambda made, token: {
            "pixel_values": made["pixel_values"],
            "image_num_patches": torch.tensor(len(made["pixel_values"])),
            "image_token_id": torch.tensor(token),
        },
        stacked=["image_num_patches", "image_token_id"],
        on_host=["image_num_patches", "image_token_id"],
    ),
}
"""The inputs of each family, by the rule by which the family counts the tokens of a picture."""


class PictureInputs:
    """The pictures of running requests, in one worker."""

    def __init__(self, path: str) -> None:
        """`path`: folder or name of the base model."""
        self._path = path
        self._processor: Processor | None = None
        self._pictures: dict[int, np.ndarray] = {}
        """The scaled pixels of each picture, by number."""

    def take(self, number: int, shape: Sequence[int], pixels: bytes) -> None:
        self._pictures[number] = np.frombuffer(pixels, np.uint8).reshape(shape)

    def forget(self, number: int) -> None:
        self._pictures.pop(number, None)

    def fill(self, item: Any) -> Any:
        """The item of a picture with the inputs of the tower."""
        if self._processor is None:
            self._processor = load_processor(self._path)
        processor = self._processor
        picture = processor.of_pixels(self._pictures[int(item[NUMBER].data)])
        form = FORMS[processor.counting.rule]
        made = {name: torch.from_numpy(one) for name, one in processor.arrays([picture]).items()}
        return item_of(form.inputs(made, processor.picture_token), stacked=form.stacked, on_host=form.on_host)


class PictureInfo:
    """Stands for vLLM's processor of pictures, which needs a tokenizer and never runs. It answers what vLLM asks."""

    supported_mm_limits: ClassVar[Mapping[str, int | None]] = {MODALITY: None}
    allowed_mm_limits: ClassVar[Mapping[str, int]] = {MODALITY: 2**20}
    skip_prompt_length_check = False

    def __init__(self, model_config: Any) -> None:
        self.info = self.ctx = self
        self.model_config = model_config
        self._most_tokens = (model_config.multimodal_config.mm_processor_kwargs or {}).get("most_tokens", 1)

    def get_dummy_mm_inputs(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this to warm its processor up."""

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {MODALITY: min(self._most_tokens, seq_len)}
