"""The planner's numbers for a model, from its config.json, are those of the loaded model."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from sampler_service.core.sizing import kv_bytes_per_token, measured_cache
from tests.support.models import VISION, make_model, make_vision_model
from tests.unit.modeling.test_families import load
from tinsmith.modeling.adaptation import adapt
from tinsmith.modeling.adapter import AdapterConfig, Target, num_elements
from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.pretrained import auto_class
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning.config_files import read, stored_parameters
from tinsmith_cli.planning.families import FAMILIES, of_config
from tinsmith_cli.planning.shape import Matrix, Shape

CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral", "gpt_oss": "GptOss", "deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe",
    "qwen3_vl_text": "Qwen3VL", "qwen3_vl_moe_text": "Qwen3VLMoe", "qwen3_5_text": "Qwen3_5Text",
    "qwen3_5_moe_text": "Qwen3_5MoeText", "gemma3_text": "Gemma3Text",
}  # fmt: skip
CONFIGS = Path(__file__).parents[3] / "support" / "plans" / "models"
PUBLISHED = {
    "Qwen3-0.6B": 0.6, "Qwen3-4B": 4.0, "Qwen3-8B": 8.2, "Qwen3-32B": 32.8, "Llama-3.1-8B": 8.0, "Llama-3.1-70B": 70.6,
    "Qwen3-30B-A3B": 30.5, "gpt-oss-20b": 20.9, "DeepSeek-V3": 671.0, "Kimi-K2": 1026.0,
}  # fmt: skip
"""Parameters as published, in billions."""


def described(targets: list[Matrix]) -> Counter[tuple[object, ...]]:
    return Counter((one.inputs, one.outputs, one.group, one.num_experts, one.shares) for one in targets)


def real(targets: list[Target]) -> Counter[tuple[object, ...]]:
    return Counter((one.in_features, one.out_features, one.group, one.num_experts or 0, one.shared) for one in targets)


def assert_same(found: Shape, parameters: int, targets: list[Target]) -> None:
    assert found.parameters == parameters
    assert described(found.targets) == real(targets)
    assert found.adapter_elements(5) == num_elements(AdapterConfig(rank=5), targets)


def test_every_exact_family_is_compared() -> None:
    assert set(CLASSES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_computed_as_it_is_loaded(family: str, tmp_path: Path) -> None:
    base = load(tmp_path, CLASSES[family])
    found = read(tmp_path, name="model")
    assert found.family == family
    assert_same(found, sum(one.numel() for one in base.parameters.values()), list(base.targets))
    assert (found.context, found.vocab, len(found.layers)) == (base.max_context_length, 256, len(base.layers))
    assert found.kv_elements * 4 == kv_bytes_per_token(measured_cache(base))
    assert not found.is_estimate


@pytest.mark.parametrize("family", sorted(set(VISION) - {"Llava"}))  # no feature depends on its last layer
def test_a_model_with_a_vision_tower_is_computed_as_it_is_loaded(family: str, tmp_path: Path) -> None:
    base = BaseModel.load(make_vision_model(tmp_path, family), device=torch.device("cpu"), dtype=torch.float32)
    found = read(tmp_path, name="model")
    groups: dict[bool, list[Target]] = {True: [], False: []}
    for target in base.targets:
        groups[target.group == "vision"].append(target)
    assert groups[True]
    assert_same(found, sum(one.numel() for one in base.parameters.values()), groups[False])
    assert described(list(found.tower)) == real(groups[True])
    everything = AdapterConfig(rank=5, train_vision=True)
    assert found.adapter_elements(5, vision=True) == num_elements(everything, base.targets)
    beside = [one for name, one in base.parameters.items() if "language_model" not in name and "lm_head" not in name]
    assert found.tower_parameters == sum(one.numel() for one in beside)
    assert found.kv_elements * 4 == kv_bytes_per_token(measured_cache(base))
    assert found.is_estimate == (found.family not in FAMILIES)


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Gemma3"])
def test_a_vision_model_of_published_size_is_computed_as_transformers_makes_it(family: str) -> None:
    config: PretrainedConfig = getattr(transformers, f"{family}Config")()
    found = of_config(config.to_dict(), name=family)
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.bfloat16)
    assert found.parameters == sum(one.numel() for one in model.parameters()) > 2e9
    targets, refused = adapt(model, ActiveRuns(), replace=True)
    assert not refused
    assert described(found.targets) == real(list(targets))
    assert found.recurrent == family.startswith("Qwen3_5")


@pytest.mark.parametrize(
    ("family", "settings", "tower"),
    [
        ("Gemma4", {"vision_config": {}, "audio_config": {}}, 477e6),
        ("Kimi_K25", {}, 471e6),
        ("Mistral3", {}, 439e6),
        ("Llava", {}, 324e6),
        ("InternVL", {}, 338e6),
        ("PaliGemma", {}, 402e6),
    ],
)
def test_a_tower_without_a_formula_is_counted(family: str, settings: dict[str, Any], tower: float) -> None:
    config: PretrainedConfig = getattr(transformers, f"{family}Config")(**settings)
    found = of_config(config.to_dict(), name=family)
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.bfloat16)
    assert found.parameters == sum(one.numel() for one in model.parameters())
    assert found.tower_parameters == pytest.approx(tower, rel=0.01)
    assert bool(found.tower) == (family != "PaliGemma"), "it takes no pictures here"
    targets, refused = adapt(model, ActiveRuns(), replace=True)
    assert not refused
    assert described(found.targets) == real(list(targets))
    assert found.is_estimate == (found.family not in FAMILIES)
    assert ("are unknown to the planner: parameters are counted" in found.note) == found.is_estimate


def test_kimi_k2_5_as_it_is_published_is_quantised_and_names_its_language_model_otherwise() -> None:
    text = json.loads((CONFIGS / "Kimi-K2.json").read_text())
    text |= {"model_type": "kimi_k2", "quantization_config": {"quant_method": "compressed-tensors"}}
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    found = of_config(config, name="Kimi-K2.5")
    assert found.family == "deepseek_v3"
    assert found.parameters == pytest.approx(1027e9, rel=0.01)
    assert found.note.startswith("the files are quantised (compressed-tensors)")
    assert not found.is_estimate


@pytest.mark.parametrize("num_stored", [None, 9e9])
def test_a_tower_that_cannot_be_counted_is_named(num_stored: float | None) -> None:
    text = json.loads((CONFIGS / "Qwen3-8B.json").read_text())
    config = {"model_type": "seer", "text_config": text, "vision_config": {"layers": 3}, "audio_config": {"layers": 3}}
    found = of_config(config, name="model", stored=None if num_stored is None else int(num_stored))
    whole = of_config(text, name="model")
    assert found.is_estimate
    assert found.note.startswith(
        "parts beside the language model (vision_config, audio_config) cannot be counted (transformers does not know "
        "models of type 'seer'): "
    )
    if num_stored is None:
        assert found.note.endswith("the plan leaves them out, and each service takes more memory by them")
        assert found.parameters == whole.parameters
    else:
        assert found.note.endswith("they are taken to be the rest of the files")
        assert found.parameters == num_stored
        assert found.tower_parameters == num_stored - whole.parameters


def test_an_unknown_family_that_transformers_knows_is_counted_without_files() -> None:
    config = transformers.Olmo2Config()
    found = of_config(config.to_dict(), name="Olmo 2")
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.bfloat16)
    assert_same(
        found, sum(one.numel() for one in model.parameters()), list(adapt(model, ActiveRuns(), replace=True)[0])
    )
    assert found.is_estimate
    assert "'olmo2' are unknown to the planner: parameters are counted" in found.note


def test_without_transformers_an_unknown_tower_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = json.loads((CONFIGS / "Qwen3-8B.json").read_text())
    found = of_config({"model_type": "internvl", "text_config": text, "vision_config": {}}, name="model")
    assert "(vision_config) cannot be counted (transformers is not installed here)" in found.note


def test_gemma_3_as_it_is_published_leaves_most_settings_out() -> None:
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "sliding_window": 1024,
    }  # fmt: skip
    vision = {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = {"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": text, "vision_config": vision}
    found = of_config(config, name="gemma-3-4b-it")
    assert found.parameters == pytest.approx(4.3e9, rel=0.01)
    assert found.tied


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_large_model_is_computed_as_transformers_makes_it(name: str) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    found = of_config(config, name=name)
    assert found.parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)
    config.pop("quantization_config", None)
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(made).from_config(made, dtype=torch.bfloat16)
    active = ActiveRuns()
    targets, refused = adapt(model, active, replace=True)
    assert not refused
    assert_same(found, sum(one.numel() for one in model.parameters()), list(targets))


def test_an_unknown_family_is_estimated_from_its_files(tmp_path: Path) -> None:
    exact = read(make_model(tmp_path), name="model")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gemma9"}))
    found = read(tmp_path, name="model")
    assert found.is_estimate
    assert "'gemma9' are unknown to the planner" in found.note
    assert found.parameters == exact.parameters  # the header of the file counts them
    assert found.kv_elements == exact.kv_elements


def test_the_index_gives_the_size_of_several_files(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16_000}}))
    assert stored_parameters(tmp_path) == 8000
    index.write_text(json.dumps({"metadata": {"total_size": 16_000, "total_parameters": 9000}}))
    assert stored_parameters(tmp_path) == 9000
    index.write_text("{")
    assert stored_parameters(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "no hidden_size, which the size of a model of type 'qwen3' depends on"),
        ({"num_hidden_layers": "two"}, "config.json does not describe a model of type 'qwen3'"),
        ({"model_type": "gemma9"}, "the planner does not know models of type 'gemma9'"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(change: dict[str, Any], message: str) -> None:
    config = {**json.loads((CONFIGS / "Qwen3-8B.json").read_text()), **change}
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(UsageError, match=message):
        of_config(config, name="model")


def test_a_folder_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model: cannot read config\.json"):
        read(tmp_path, name="model")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"model: config\.json is not a JSON object"):
        read(tmp_path, name="model")
