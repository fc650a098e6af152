"""Models with pictures that vLLM runs on a CPU, and prompts for them."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.models import VISION, make_vision_model
from tests.unit.sampler_service.serving import sample
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2 as types

PIXELS = np.random.default_rng(0).integers(256, size=(90, 90, 3), dtype=np.uint8)
WIDE, HIGH = (Image.fromarray(PIXELS[:h, :w]) for w, h in ((37, 21), (17, 30)))
"""15 and 8 tokens."""
OTHER = Image.fromarray(255 - PIXELS[:21, :37])


def make(folder: Path, family: str = "Qwen3VL") -> Path:
    """A model with heads of the sizes that vLLM's attention has on a CPU."""
    text = {**VISION[family]["text_config"], "hidden_size": 128, "head_dim": 32, "vocab_size": 2048}
    text |= {"max_position_embeddings": 512, "eos_token_id": 9, "bos_token_id": 10}
    tower = VISION[family]["vision_config"]
    if family == "Qwen3VL":
        sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, **sections}
    elif family == "Gemma3":
        tower = {**tower, "vision_use_head": False}  # as in the published files
    elif "mrope_section" in text.get("rope_parameters", {}):
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [8, 4, 4]}
    if "out_hidden_size" in tower:
        tower = {**tower, "out_hidden_size": 128}
    make_vision_model(folder, family, text_config=text, vision_config=tower)
    if family == "Gemma3":  # vLLM knows the names in the published files, and not those that transformers writes now
        tensors = load_file(folder / "model.safetensors")
        parts = r"^vision_tower\.(embeddings|encoder|post_layernorm)\."
        renamed = {re.sub(parts, r"vision_tower.vision_model.\1.", name): one for name, one in tensors.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def chunk(image: Image.Image, **fields: Any) -> types.Chunk:
    file = io.BytesIO()
    image.save(file, "PNG")
    return types.Chunk(image=types.Image(**{"data": file.getvalue(), "format": "png", **fields}))


def text(length: int, *, seed: int = 0) -> types.Chunk:
    tokens = np.random.default_rng(seed).integers(10, 2000, length).astype("<i4")
    return types.Chunk(encoded_text=types.EncodedText(tokens=tokens.tobytes()))


PICTURE_TOKENS = {5: -100.0, 6: -100.0}
"""A bias that keeps tokens of pictures and videos from being drawn."""


def asked(*chunks: types.Chunk, **fields: Any) -> pb.SampleRequest:
    request = sample([], **{"max_tokens": 6, "seed": 1, "logit_bias": PICTURE_TOKENS, **fields})
    del request.prompt[:]
    request.prompt.extend(chunks)
    return request
