"""Shapes of models and of batches, by name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
}
"""Qwen3 models as published (the tiny one is ours), with random weights."""
SMALL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
}
"""The settings that the small hybrid models share with `--size small`."""
HYBRID_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5-small": (
        "qwen3_5_text",
        {
            **SMALL,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h-small": (
        "nemotron_h",
        {
            **SMALL,
            "intermediate_size": 2016,
            "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "mamba", "attention", "mlp"] * 2,
            "mamba_num_heads": 12,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 2,
            "chunk_size": 128,
        },
    ),
}
"""Type and settings of hybrid models, small, with the published ones' ratios of layers and sizes: Qwen3.5 has three
Gated DeltaNet layers for each of attention, Nemotron-H mostly Mamba2 and feed-forward layers. They are stored, so that
the padded loop can load them, too."""


def qwen3_config(name: str) -> Qwen3Config:
    """The settings of one of MODEL_SHAPES."""
    return Qwen3Config(head_dim=128, max_position_embeddings=40960, **MODEL_SHAPES[name])


def store_shape(name: str, folder: Path) -> Path:
    """Makes the model of this shape, with random weights, unless it is there: HYBRID_SHAPES in float32, MODEL_SHAPES in
    bfloat16, as they are published. Returns its folder."""
    folder = folder.expanduser() / name
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        if name in MODEL_SHAPES:
            # A CPU takes minutes for 8 billion random numbers.
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                model = AutoModelForCausalLM.from_config(qwen3_config(name), dtype=torch.bfloat16)
        else:
            kind, settings = HYBRID_SHAPES[name]
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()  # the services that are measured count the free memory of the device
    return folder


def parse_shapes(text: str) -> dict[str, list[int]]:
    """ "16x256,ragged" -> lengths by name; ragged is 16 sequences of 16..1024 tokens, log-uniformly."""
    shapes = {}
    for name in text.split(","):
        if name == "ragged":
            drawn = np.random.default_rng(0).uniform(np.log(16), np.log(1024), size=16)
            shapes[name] = np.exp(drawn).astype(int).tolist()
            continue
        count, _, length = name.partition("x")
        if not (count.isdigit() and length.isdigit() and int(count) and int(length)):
            raise argparse.ArgumentTypeError(f"{name!r} is neither COUNTxLENGTH, such as 16x256, nor ragged")
        shapes[name] = [int(length)] * int(count)
    return shapes
