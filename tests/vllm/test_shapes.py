"""Versions of all parameters of other families than the one that the rest is tested with, against transformers."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from tests.support.models import TINY_CONFIG
from tests.unit.sampler_service.full_versions import make_full, save
from tests.unit.sampler_service.serving import plain_logits
from tests.vllm.client import TOLERANCE
from tests.vllm.service import PYTHON
from tinsmith.modeling.base_model import BaseModel

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SIZES = {**TINY_CONFIG, "hidden_size": 128, "head_dim": 32}
"""vLLM's attention on a CPU has no heads of 16."""
SHAPES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),  # with biases
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3_5": Qwen3_5TextConfig(
        **SIZES, tie_word_embeddings=False, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip


def logprobs(folder: Path, tokens: list[int]) -> np.ndarray:
    """log P of each token but the first, by transformers."""
    table = plain_logits(folder, tokens).log_softmax(-1)
    return table[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each shape: a base model, and a version of it as a folder and as the buffer that the worker gets."""
    root = tmp_path_factory.mktemp("shapes")
    tokens = np.random.default_rng(1).integers(SIZES["vocab_size"], size=40).tolist()
    folders = {name: root / name for name in SHAPES}
    for name, config in SHAPES.items():
        folder = folders[name]
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
        base = BaseModel.load(folder / "base", device=torch.device("cpu"), dtype=torch.float32)
        version = make_full(base, seed=1)
        save_file({"flat": version.flat}, folder / "version.safetensors")
        save(version, folder / "version")
        (folder / "tokens.json").write_text(json.dumps(tokens))
    return folders


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> dict[str, Any]:
    assert PYTHON.exists(), "make test-vllm makes it"
    done = subprocess.run(
        [PYTHON, "-m", "tests.vllm.shapes", folders["llama"].parent], cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SHAPES)
def test_a_version_gives_the_logprobs_of_its_parameters_and_the_base_model_its_own_again(
    folders: dict[str, Path], found: dict[str, Any], name: str
) -> None:
    tokens = json.loads((folders[name] / "tokens.json").read_text())
    assert not found[name]["refused"]
    base, version, again = (np.array(one) for one in found[name]["logprobs"])
    np.testing.assert_allclose(base, logprobs(folders[name] / "base", tokens), atol=TOLERANCE)
    np.testing.assert_allclose(version, logprobs(folders[name] / "version", tokens), atol=TOLERANCE)
    np.testing.assert_array_equal(again, base)
    assert np.abs(version - base).max() > 0.1
