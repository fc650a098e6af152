"""The families of models that see pictures here. CONTRIBUTING.md says how another one is added.

A family is known by the `model_type` of its configuration. Whatever a row says is compared with the model's own forward
pass when a model is loaded (tinsmith/modeling/picture_check.py); a model that differs takes no pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tinsmith.pictures.counting import ByArea, Counting, OneSize


@dataclass(frozen=True, slots=True)
class Family:
    """What a family needs."""

    name: str
    """As in messages to users."""
    tokens: str
    """How many tokens a picture has, in words for docs/models.md."""
    processor: str
    """Class of transformers' image processor that works with Pillow alone."""
    counting: Callable[[Any, Any], Counting]
    """Makes the rule of the image processor and the model's configuration. Raises ValueError for settings that are not
    supported, with the reason."""
    grid: bool = False
    """Whether positions count the rows and columns of a picture's tokens (M-RoPE)."""
    sees_ahead: Literal["", "everywhere", "in windows"] = ""
    """Whether the tokens of a picture see each other in both directions: in all layers, or only in those whose
    attention has a window."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which the image processor leaves the size of a scaled picture as it is."""


def _by_area(processor: Any, _: Any) -> ByArea:
    return ByArea.of(processor)


def _gemma3(processor: Any, config: Any) -> OneSize:
    if processor.do_pan_and_scan:
        raise ValueError("its image processor cuts pictures into several (do_pan_and_scan), which is not supported")
    return OneSize(processor.size["width"], processor.size["height"], config.mm_tokens_per_image)


_BY_AREA = "by its area, in rows and columns"
_QWEN = Family("Qwen2-VL to Qwen3.5", _BY_AREA, "Qwen2VLImageProcessorPil", _by_area, grid=True)

FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": Family("Gemma 3", "one number for all", "Gemma3ImageProcessorPil", _gemma3, sees_ahead="everywhere"),
}
"""By the `model_type` of a model's configuration."""


def family_of(config: Any) -> Family:
    """The family of a model. Raises ValueError, with the reason, for a model that takes no pictures here."""
    if getattr(config, "vision_config", None) is None:
        raise ValueError("it sees text only")
    if config.model_type not in FAMILIES:
        known = ", ".join(dict.fromkeys(one.name for one in FAMILIES.values()))
        raise ValueError(f"pictures are not supported for models of type {config.model_type}; they are for {known}")
    return FAMILIES[config.model_type]
