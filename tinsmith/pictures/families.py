"""The families of models that see pictures here. CONTRIBUTING.md says how another one is added.

The `model_type` in a model's configuration names its family. When a model is loaded, the properties of its family are
compared with the model's own forward pass (tinsmith/modeling/picture_check.py). A model that differs takes no pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinsmith.pictures.counting import Bounded, ByArea, Counting, Cropped, Filling, OneSize, Rows, Tiled


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of one family."""

    name: str
    """Name of the family, for messages to users."""
    tokens: str
    """Number of tokens of a picture, in words for docs/models.md."""
    processor: str
    """Class of the image processor that works with Pillow alone: transformers' own, or one of tinsmith.pictures."""
    counting: Callable[[Any, Any], Counting]
    """Makes the rule for counting tokens from the image processor and the model's configuration. Raises ValueError,
    with the reason, for settings that are not supported."""
    grid: bool = False
    """Whether positions count the rows and columns of a picture's tokens (M-RoPE)."""
    rounded: bool = False
    """Whether the tower takes pixels in the model's dtype only. Others convert float32 themselves."""
    sees_ahead: Callable[[Any], Literal["", "everywhere", "in windows"]] = lambda _: ""
    """Whether the tokens of a picture see each other in both directions in a model with this configuration: in all
    layers, or only in those whose attention has a window."""
    two_way: str = "no"
    """`sees_ahead` in words, for docs/models.md."""
    in_chats: Callable[[Any], tuple[Sequence[int], Sequence[int]] | None] = lambda _: ((), ())
    """The tokens that the model's own processor puts before and after the tokens of a picture, where the chat template
    has rendered one token. None if it changes the text there, so that chats take no pictures."""
    row_ends: tuple[str, str] | None = None
    """The tokens, as in the vocabulary, that end each row of a picture's tokens and its last row; None if tokens of one
    kind alone stand for a picture."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which the image processor leaves the size of a scaled picture as it is."""


def _by_area(processor: Any, _: Any) -> ByArea:
    return ByArea.of(processor)


def _gemma3(processor: Any, config: Any) -> OneSize:
    if processor.do_pan_and_scan:
        raise ValueError("its image processor cuts pictures into several (do_pan_and_scan), which is not supported")
    return OneSize(processor.size["width"], processor.size["height"], config.mm_tokens_per_image)


def _glm(processor: Any, _: Any) -> ByArea:
    size, frames = processor.size, processor.temporal_patch_size  # the processor counts a picture as this many frames
    limits = size["shortest_edge"] // frames, size["longest_edge"] // frames
    return ByArea(processor.patch_size, processor.merge_size, *limits, enlarges=1)


def _gemma4(processor: Any, _: Any) -> Filling:
    return Filling(processor.patch_size * processor.pooling_kernel_size, processor.max_soft_tokens)


def _gemma4_ahead(config: Any) -> Literal["", "in windows"]:
    return "in windows" if config.get_text_config().use_bidirectional_attention == "vision" else ""


def _kimi(processor: Any, _: Any) -> Bounded:
    if processor.size["max_height"] != processor.size["max_width"]:
        raise ValueError("its image processor has another max_height than max_width, which is not supported")
    if processor.fixed_output_tokens is not None:
        raise ValueError(
            "its image processor gives every picture as many tokens (fixed_output_tokens), which is not supported"
        )
    return Bounded(processor.patch_size, processor.merge_size, processor.max_patches, processor.size["max_height"])


def _mistral3(processor: Any, config: Any) -> Rows:
    tower = config.vision_config
    if tower.model_type != "pixtral":
        raise ValueError(f"its vision tower, {tower.model_type}, is not supported; pixtral is")
    if not processor.size.get("longest_edge"):
        raise ValueError("its image processor names no longest_edge, which is not supported")
    return Rows(tower.patch_size * config.spatial_merge_size, processor.size["longest_edge"])


def _llava(processor: Any, config: Any) -> Cropped:
    tower, crop = config.vision_config, processor.crop_size
    if tower.model_type != "clip_vision_model":
        raise ValueError(f"its vision tower, {tower.model_type}, is not supported; clip_vision_model is")
    size = processor.size
    if not processor.do_center_crop or not size.get("shortest_edge") or size.get("longest_edge"):
        raise ValueError("its image processor does not scale by the shorter side and crop, which alone is supported")
    patches = (crop["height"] // tower.patch_size) * (crop["width"] // tower.patch_size)
    more = config.vision_feature_select_strategy != "default"  # the token of the class
    return Cropped(crop["width"], crop["height"], patches + more, size["shortest_edge"])


def _internvl(processor: Any, config: Any) -> Tiled:
    tower = config.vision_config
    rows, columns = (
        size // patch * config.downsample_ratio for size, patch in zip(tower.image_size, tower.patch_size, strict=True)
    )
    width, height = processor.size["width"], processor.size["height"]
    if (height, width) != tuple(tower.image_size):
        raise ValueError(f"its image processor makes tiles of {width} x {height} pixels, and its tower takes others")
    # Its processor of pictures and text cuts them always, whatever `crop_to_patches` of the image processor says.
    return Tiled(width, height, int(rows * columns), processor.min_patches, processor.max_patches)


_BY_AREA = "by its area, in rows and columns"
_QWEN = Family("Qwen2-VL to Qwen3.5", _BY_AREA, "Qwen2VLImageProcessorPil", _by_area, grid=True)
_GLM = Family("GLM-4.1V to 4.5V", _BY_AREA, "Glm4vImageProcessorPil", _glm, grid=True)

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "exaone4_5": Family("EXAONE 4.5", _BY_AREA, "Qwen2VLImageProcessorPil", _by_area),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "gemma3": Family(
        "Gemma 3",
        "one number for all",
        "Gemma3ImageProcessorPil",
        _gemma3,
        sees_ahead=lambda _: "everywhere",
        two_way="everywhere",
        in_chats=lambda _: None,
    ),
    "gemma4": Family(
        "Gemma 4",
        "as many as it may have, in its proportions",
        "Gemma4ImageProcessorPil",
        _gemma4,
        sees_ahead=_gemma4_ahead,
        in_chats=lambda config: ([config.boi_token_id], [config.eoi_token_id]),
        two_way='in layers with a window, where `use_bidirectional_attention` is "vision"',
    ),
    "kimi_k25": Family("Kimi K2.5 and K2.6", _BY_AREA, "Kimi_K25ImageProcessorPil", _kimi, rounded=True),
    "mistral3": Family(
        "Mistral 3",
        "by its area, in rows, each with one more token at its end",
        "PixtralImageProcessorPil",
        _mistral3,
        row_ends=("[IMG_BREAK]", "[IMG_END]"),
    ),
    "llava": Family("LLaVA", "one number for all", "CLIPImageProcessorPil", _llava),
    "internvl": Family(
        "InternVL",
        "one number for each of the tiles into which it is cut by its proportions",
        "GotOcr2ImageProcessorPil",
        _internvl,
        in_chats=lambda _: None,  # the tokens around a picture are known to its tokenizer alone
        options={"crop_to_patches": False},
    ),
}
"""The families, by the `model_type` of a model's configuration."""


def family_of(config: Any) -> Family:
    """The family of a model. Raises ValueError, with the reason, for a model that takes no pictures here."""
    if getattr(config, "vision_config", None) is None:
        raise ValueError("it sees text only")
    if config.model_type not in FAMILIES:
        known = ", ".join(dict.fromkeys(one.name for one in FAMILIES.values()))
        raise ValueError(f"pictures are not supported for models of type {config.model_type}; they are for {known}")
    return FAMILIES[config.model_type]
