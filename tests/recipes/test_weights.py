"""The cookbook's weights tools, unmodified, on what this server exports: `make test-recipes`."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor

from tests.recipes.harness import FOLDERS, HUB, MODEL, PYTHON, environment
from tests.support.models import make_model, make_sparse_family
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


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([[15, 9, 13, 27, 21, 18, 30, 12, 16, 17]])).logits


def loaded(folder: Path) -> Any:
    return auto_class(load_config(folder)).from_pretrained(folder, dtype=torch.float32)


def with_changes(folder: Path, changes: dict[str, Tensor], *, embedding: bool = False) -> Any:
    """The base model, whose layers are changed by hand. `embedding`: the embedding changes as the output layer does."""
    model = loaded(folder)
    head = changes.get("lm_head.weight")
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # no longer that of the embedding
        for name, change in changes.items():
            model.get_parameter(name).add_(change)
        if embedding and head is not None:
            model.model.embed_tokens.weight.add_(head)
    return model


def run_tools(base: Path, folder: Path) -> None:
    """Has the cookbook merge and convert the adapter in `folder`/adapter, into further folders of `folder`."""
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("merge_weights.py"), base, folder / "adapter", folder],
        env=environment("http://127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.filterwarnings("ignore")  # PEFT warns of what the last lines hold
@pytest.mark.parametrize("train_unembed", [True, False], ids=["output layer", "layers"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_of_merged_and_converted_adapters_are_those_that_the_docs_tell(
    tied: bool, train_unembed: bool, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "base", tie_word_embeddings=tied)
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    adapter = Adapter.create(AdapterConfig(rank=4, seed=0, train_unembed=train_unembed), base.targets, base.device)
    adapter.flat.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    for name, each in (("plain", adapter), ("adapter", adapter.with_tinker_names())):
        (tmp_path / name).mkdir()
        each.save_peft(tmp_path / name, base_model="base")
    run_tools(folder, tmp_path)
    changes = deltas(adapter)
    assert ("lm_head.weight" in changes) == train_unembed
    trained = logits_of(with_changes(folder, changes))
    assert (logits_of(loaded(folder)) - trained).abs().max() > 0.1
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(loaded(folder), tmp_path / "plain")), trained)
    # The cookbook has one matrix for a tied pair, so it changes both.
    merged = logits_of(loaded(tmp_path / "merged"))
    torch.testing.assert_close(merged, logits_of(with_changes(folder, changes, embedding=tied)), rtol=0, atol=1e-4)
    # The adapter of a tied output layer is one of the embedding in the converted file, and PEFT does not load it.
    kept = {name: change for name, change in changes.items() if not (tied and name == "lm_head.weight")}
    converted = logits_of(PeftModel.from_pretrained(loaded(folder), tmp_path / "lora"))
    torch.testing.assert_close(converted, logits_of(with_changes(folder, kept)), rtol=0, atol=1e-4)
    if tied and train_unembed:
        assert (merged - trained).abs().max() > 1e-2
        assert (converted - trained).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore")  # PEFT warns of patterns that fit no layer
@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen3_5Moe", "DeepseekV3", "GptOss", "NemotronH"])
def test_the_tools_merge_an_adapter_of_fused_experts(family: str, tmp_path: Path) -> None:
    base_folder = make_sparse_family(tmp_path / "base", family)
    base = BaseModel.load(base_folder, device=torch.device("cpu"), dtype=torch.float32)
    adapter = Adapter.create(AdapterConfig(rank=4, seed=0), base.targets, base.device)
    adapter.flat.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    (tmp_path / "adapter").mkdir()
    adapter.with_tinker_names().save_peft(tmp_path / "adapter", base_model=family)
    run_tools(base_folder, tmp_path)
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
        # PEFT knows the fused experts of Qwen3-MoE in this form, and leaves out those of others without a warning.
        kept = {name: change for name, change in changes.items() if change.ndim == 2}
        expected = loaded(tmp_path / "merged") if family == "Qwen3Moe" else with_changes(base_folder, kept)
        converted = PeftModel.from_pretrained(loaded(base_folder), tmp_path / "lora")
        torch.testing.assert_close(logits_of(converted), logits_of(expected), rtol=0, atol=1e-4)
