"""A rank takes host memory for its part of the base model only, in whatever form the files hold it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.unit.modeling.test_parallel_tensor import step
from tinsmith.modeling.base_model import BaseModel
from tinsmith_cli.ports import free_ports
from tinsmith_cli.stack import torchrun

pytestmark = pytest.mark.slow

NUM_RANKS = 4
DIVIDED_BY = {"tensor": (2, 2), "sharded": (4, 1), "sharded-tensor": (4, 2)}
"""The number of ranks among which each layer is divided, and of those that divide its features."""
OTHER_BYTES = 12 * 2**20
"""Memory that loading takes beside weights: modules, the first group of gloo, the check's activations."""
SETTINGS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
"""Settings of models of 63 MB in float32. A quarter of a model is more than OTHER_BYTES and a part of the largest
weight, so that a rank which reads its part twice shows, too."""


def dense() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SETTINGS, intermediate_size=2048))


def sparse() -> PreTrainedModel:
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SETTINGS, **experts))


@dataclass(frozen=True, slots=True)
class Model:
    make: Callable[[], PreTrainedModel]
    dtype: torch.dtype
    layouts: Sequence[str]


MODELS = {
    "dense-float32": Model(dense, torch.float32, ("tensor", "sharded", "sharded-tensor")),
    "dense-bfloat16": Model(dense, torch.bfloat16, ("tensor", "sharded", "sharded-tensor")),
    "sparse-float32": Model(sparse, torch.float32, ("sharded",)),
    "sparse-bfloat16": Model(sparse, torch.bfloat16, ("sharded",)),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    folder: Path
    """Holds the model's files, and what each rank found with each layout."""
    all_bytes: int
    """Bytes of all weights in float32."""
    largest: int
    """Bytes of the largest weight."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Loaded]:
    """All models, loaded by the same ranks one after the other: four ranks take 20 s of a core to start."""
    found = {}
    for name, model in MODELS.items():
        torch.manual_seed(0)
        made: Any = model.make()
        sizes = [parameter.nbytes for parameter in made.parameters()]
        found[name] = Loaded(tmp_path_factory.mktemp(name), sum(sizes), max(sizes))
        made.to(model.dtype).save_pretrained(found[name].folder)
        del made
    (port,) = free_ports(1)
    arguments = [f"{found[name].folder}={layout}" for name, model in MODELS.items() for layout in model.layouts]
    # Freed memory goes back to the system at once, so that the measured memory is that of living tensors.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", *torchrun(NUM_RANKS, port), "tests.ranks.loading", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("name", MODELS)
def test_loading_takes_a_ranks_share_of_the_model_and_one_tensor(name: str, loaded: Mapping[str, Loaded]) -> None:
    folder, all_bytes, largest = loaded[name].folder, loaded[name].all_bytes, loaded[name].largest
    whole = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32, kernels="plain")
    logprobs, grads = step(whole)
    for layout in MODELS[name].layouts:
        divided_by, in_row = DIVIDED_BY[layout]
        for rank in range(NUM_RANKS):
            found = json.loads((folder / f"{layout}-{rank}").read_text())
            assert found["share"] == pytest.approx(all_bytes / divided_by, rel=0.05), (layout, rank)
            assert found["read"] <= found["share"] + largest / divided_by + OTHER_BYTES, (layout, rank)
            # The model's own forward pass gathers one weight at a time; its adapter makes a changed copy.
            assert found["peak"] <= found["share"] + 3 * largest + OTHER_BYTES, (layout, rank)
            assert found["peak"] > found["share"] / 2, "the memory was measured"
            assert found["weights_sum"] == whole.weights_sum, (layout, rank)
        for row in range(0, NUM_RANKS, in_row):
            parts = [torch.load(folder / f"{layout}-{rank}.pt") for rank in range(row, row + in_row)]
            for theirs, _ in parts:
                torch.testing.assert_close(theirs, logprobs, rtol=1e-5, atol=1e-5)
            for n, grad in enumerate(grads):
                assert (sum(part[1][n] for part in parts) - grad).norm() <= 1e-4 * grad.norm(), (layout, row, n)
