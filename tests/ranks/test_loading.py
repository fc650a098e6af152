"""A rank takes host memory for its part of the base model only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tinsmith_cli.ports import free_ports
from tinsmith_cli.stack import torchrun

pytestmark = pytest.mark.slow

NUM_RANKS = 4
LAYOUTS = {"tensor": 2, "sharded": 4, "sharded-tensor": 4}
"""The number of ranks among which each layer is divided."""
OTHER_BYTES = 12 * 2**20
"""Memory that loading takes beside weights: modules, the first group of gloo, the check's activations."""


def test_loading_takes_a_ranks_share_of_the_model_and_one_tensor(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    all_bytes = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    (port,) = free_ports(1)
    arguments = ["tests.ranks.loading", "--model", str(tmp_path / "model"), "--out", str(tmp_path), *LAYOUTS]
    # Freed memory goes back to the system at once, so that the measured memory is that of living tensors.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", *torchrun(NUM_RANKS, port), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for layout, divided_by in LAYOUTS.items():
        for rank in range(NUM_RANKS):
            found = json.loads((tmp_path / f"{layout}-{rank}").read_text())
            assert found["share"] == pytest.approx(all_bytes / divided_by, rel=0.05), (layout, rank)
            assert found["peak"] <= found["share"] + largest + OTHER_BYTES, (layout, rank)
            assert found["peak"] > found["share"] / 2, "the memory was measured"
