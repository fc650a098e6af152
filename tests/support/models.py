"""Tiny base models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 512
CONTEXT = 256

TINY_CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
"""Settings that most model families understand."""


def make_model(folder: Path, **overrides: Any) -> Path:
    """A Qwen3 of two layers, with grouped queries and, unless overridden, an output layer of its own."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,  # sharper than the default, so that a wrong position shows
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**settings, **overrides})).save_pretrained(folder)
    return folder


def make_sparse_model(folder: Path) -> Path:
    """A Qwen3-MoE of two layers with four experts, of which each token takes two."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=CONTEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def make_recurrent_model(folder: Path, **overrides: Any) -> Path:
    """A Qwen3.5 text model: a layer of Gated DeltaNet, which carries a state, and one of attention."""
    settings = {
        **TINY_CONFIG,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**settings, **overrides})).save_pretrained(folder)
    return folder
