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


COMPARED = {
    **dict.fromkeys(("Glm4v", "InternVL", "Llava", "Mistral3", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5"), "yes"),
    "Gemma3": "text only on a CPU",
    "Gemma4": "yes; where two-way, text only on a CPU",
}
"""Results of the tests with pictures in vLLM, in words for docs/models.md, by family of VISION."""


def make(folder: Path, family: str = "Qwen3VL", **more: Any) -> Path:
    """A model with heads of the sizes that vLLM's attention has on a CPU. `more`: settings of its language model."""
    text = {**VISION[family]["text_config"], "hidden_size": 128, "head_dim": 32, "vocab_size": 2048, **more}
    text |= {"max_position_embeddings": 512, "eos_token_id": 9, "bos_token_id": 10}
    tower = VISION[family]["vision_config"]
    if family == "Qwen3VL":
        sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, **sections}
    elif family == "Qwen3_5":
        sections = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            **sections,
        }
        text |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    elif family == "Gemma3":
        tower = {**tower, "vision_use_head": False}  # as in the published files
    elif family == "Gemma4":
        text |= {"global_head_dim": 32, "vocab_size_per_layer_input": 2048}
    elif family == "Glm4v":
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 3, 3]}
    elif "mrope_section" in text.get("rope_parameters", {}):
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [8, 4, 4]}
    if "out_hidden_size" in tower:
        tower = {**tower, "out_hidden_size": 128}
    make_vision_model(folder, family, text_config=text, vision_config=tower)
    if family in (
        "Gemma3",
        "Llava",
    ):  # vLLM knows the names in the published files, and not those that transformers writes now
        tensors = load_file(folder / "model.safetensors")
        parts = r"vision_tower\.(embeddings|encoder|pre_layrnorm|post_layernorm)\."
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


def prompts() -> dict[str, list[types.Chunk]]:
    return {
        "one": [text(9), chunk(WIDE), text(4, seed=1)],
        "two": [text(3), chunk(WIDE), text(4, seed=1), chunk(HIGH), text(2)],
        "first and last": [chunk(HIGH), text(30, seed=3), chunk(WIDE)],
        "twice": [text(5), chunk(OTHER), text(1), chunk(OTHER), text(8)],
        "text": [text(40)],
    }


def requests() -> dict[str, pb.SampleRequest]:
    """With versions of `cases.publish_adapters`."""
    made = {f"{name}, {version or 'base'}": asked(*chunks, version_id=version, num_samples=3, prompt_logprobs=True)
            for name, chunks in prompts().items() for version in ("", "all")}  # fmt: skip
    chunks = prompts()["two"]
    made["tables"] = asked(*chunks, topk_prompt_logprobs=3, topk_sample_logprobs=2, temperature=0.7, version_id="odd")
    made["alternatives"] = asked(*chunks, prompt_alt_tokens_k=2, temperature=0.8)
    made["penalized"] = asked(*chunks, repetition_penalty=1.3, presence_penalty=0.5, num_samples=2, max_tokens=20)
    return made
