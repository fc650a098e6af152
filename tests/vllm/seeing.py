"""Models with pictures that vLLM runs on a CPU, and prompts for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.models import VISION, make_vision_model
from tinsmith.v1 import types_pb2 as types

PIXELS = np.random.default_rng(0).integers(256, size=(90, 90, 3), dtype=np.uint8)
WIDE, HIGH = (Image.fromarray(PIXELS[:h, :w]) for w, h in ((37, 21), (17, 30)))
"""15 and 8 tokens."""
OTHER = Image.fromarray(255 - PIXELS[:21, :37])


def make(folder: Path, family: str = "Qwen3VL") -> Path:
    """A model with heads of the sizes that vLLM's attention has on a CPU."""
    text = {**VISION[family]["text_config"], "hidden_size": 128, "head_dim": 32, "vocab_size": 2048}
    text["max_position_embeddings"] = 512
    tower = VISION[family]["vision_config"]
    if family == "Qwen3VL":
        sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, **sections}
    elif "mrope_section" in text.get("rope_parameters", {}):
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [8, 4, 4]}
    if "out_hidden_size" in tower:
        tower = {**tower, "out_hidden_size": 128}
    return make_vision_model(folder, family, text_config=text, vision_config=tower)


def chunk(image: Image.Image, **fields: Any) -> types.Chunk:
    file = io.BytesIO()
    image.save(file, "PNG")
    return types.Chunk(image=types.Image(**{"data": file.getvalue(), "format": "png", **fields}))


def text(length: int, *, seed: int = 0) -> types.Chunk:
    tokens = np.random.default_rng(seed).integers(10, 2000, length).astype("<i4")
    return types.Chunk(encoded_text=types.EncodedText(tokens=tokens.tobytes()))
