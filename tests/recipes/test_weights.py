"""The cookbook's weights tools, unmodified, on what this server exports: `make test-recipes`."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.recipes.harness import HUB, MODEL, PYTHON, environment

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(300)]


def export(base_url: str, out: Path, *, train_unembed: bool) -> dict[str, list[float]]:
    out.mkdir()
    done = subprocess.run(
        [
            *(PYTHON, Path(__file__).with_name("export_weights.py")),
            *(MODEL, HUB / "base_model", out, "yes" if train_unembed else "no"),
        ],
        env=environment(base_url),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def names_in(file: Path) -> set[str]:
    with safe_open(file, framework="np") as opened:
        return set(opened.keys())


def test_a_downloaded_adapter_merges_into_the_model_that_was_trained(base_url: str, tmp_path: Path) -> None:
    logprobs = export(base_url, tmp_path / "out", train_unembed=False)
    np.testing.assert_allclose(logprobs["merged"], logprobs["trained"], atol=1e-4)


def test_the_tools_take_an_adapter_of_a_tied_output_layer(base_url: str, tmp_path: Path) -> None:
    """The base model has one matrix for its embedding and its output layer, and so has the merged one: the merge
    changes the embedding, too, which the training did not."""
    logprobs = export(base_url, tmp_path / "out", train_unembed=True)
    assert np.all(np.isfinite(logprobs["merged"]))
    assert any("unembed_tokens" in name for name in names_in(tmp_path / "out/adapter/adapter_model.safetensors"))
    assert any("embed_tokens" in name for name in names_in(tmp_path / "out/lora/adapter_model.safetensors"))
