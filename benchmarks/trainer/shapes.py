"""Shapes of models and of batches, by name."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

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
"""Qwen3 models as published (the tiny one is ours), filled with random weights on the device."""


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
