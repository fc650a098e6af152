"""The cookbook's weights tools, unmodified, on what this server exports: `make test-recipes`."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.recipes.harness import FOLDERS, HUB, MODEL, PYTHON, environment
from tests.support.models import make_sparse_family
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.config import load_config
from tinsmith.modeling.peft_import import import_peft
from tinsmith.modeling.pretrained import auto_class

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(300)]


def export(
    base_url: str, out: Path, *, model: str = MODEL, kind: str = "weights", train_unembed: bool = False
) -> dict[str, list[float]]:
    out.mkdir()
    done = subprocess.run(
        [
            *(PYTHON, Path(__file__).with_name("export_weights.py")),
            *(model, HUB / FOLDERS[model], out, "yes" if train_unembed else "no", kind),
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


@pytest.mark.parametrize("kind", ["weights", "external_weights"])
@pytest.mark.parametrize("model", [MODEL, "Qwen/Qwen3.5-9B"])
def test_a_downloaded_adapter_merges_into_the_model_that_was_trained(
    model: str, kind: str, base_url: str, tmp_path: Path
) -> None:
    """Qwen3.5 in its published form has an encoder of images, so its layers have other names in external weights, and
    layers of linear attention."""
    logprobs = export(base_url, tmp_path / "out", model=model, kind=kind)
    assert np.abs(np.subtract(logprobs["base"], logprobs["trained"])).max() > 0.1
    np.testing.assert_allclose(logprobs["merged"], logprobs["trained"], atol=1e-4)


def test_the_tools_take_an_adapter_of_a_tied_output_layer(base_url: str, tmp_path: Path) -> None:
    """The base model has one matrix for its embedding and its output layer, and so has the merged one: the merge
    changes the embedding, too, which the training did not."""
    logprobs = export(base_url, tmp_path / "out", train_unembed=True)
    assert np.all(np.isfinite(logprobs["merged"]))
    assert any("unembed_tokens" in name for name in names_in(tmp_path / "out/adapter/adapter_model.safetensors"))
    assert any("embed_tokens" in name for name in names_in(tmp_path / "out/lora/adapter_model.safetensors"))


def weights_of(folder: Path) -> dict[str, Tensor]:
    model = auto_class(load_config(folder)).from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def deltas(adapter: Adapter) -> dict[str, Tensor]:
    """Change of each weight, by its name in the model."""
    found = {}
    for target in adapter.targets:
        pair = adapter.weights[target.name]
        a, b = pair.a_R_I.double(), pair.b_O_R.double()
        name = f"{target.name}.weight" if target.num_experts is None else target.name
        found[name] = (b @ a * adapter.scaling).float()
    return found


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen3_5Moe", "DeepseekV3", "GptOss", "NemotronH"])
def test_the_tools_merge_an_adapter_of_fused_experts(family: str, tmp_path: Path) -> None:
    base_folder = make_sparse_family(tmp_path / "base", family)
    base = BaseModel.load(base_folder, device=torch.device("cpu"), dtype=torch.float32)
    adapter = Adapter.create(AdapterConfig(rank=4, seed=0), base.targets, base.device)
    adapter.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    (tmp_path / "adapter").mkdir()
    adapter.with_tinker_names().save_peft(tmp_path / "adapter", base_model=family)
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("merge_weights.py"), base_folder, tmp_path / "adapter", tmp_path],
        env=environment("http://127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    imported = import_peft(tmp_path / "adapter", base.targets, {}, base_model=family, max_rank=4).adapter
    assert torch.equal(imported.flat, adapter.flat)
    before, merged, changes = weights_of(base_folder), weights_of(tmp_path / "merged"), deltas(adapter)
    assert set(merged) == set(before)
    assert set(changes) <= set(before)
    num_layers = 1 if family in ("DeepseekV3", "NemotronH") else 2  # those with experts
    assert sum(tensor.ndim == 3 for tensor in changes.values()) == 2 * num_layers
    for name, tensor in before.items():
        if name in changes:
            assert changes[name].abs().max() > 0.1
            change = changes[name] if changes[name].shape == tensor.shape else changes[name].mT
            torch.testing.assert_close(merged[name], tensor + change, rtol=0, atol=1e-5)
        else:
            assert torch.equal(merged[name], tensor)
    if family != "DeepseekV3":  # whose adapters the cookbook does not convert
        names = names_in(tmp_path / "lora/adapter_model.safetensors")
        for projection in ("up_proj", "down_proj") if family == "NemotronH" else ("gate_proj", "up_proj", "down_proj"):
            assert sum(f".experts.3.{projection}.lora_A" in name for name in names) == num_layers
