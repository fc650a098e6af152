"""The planner's numbers for a model, from its config.json, are those of the loaded model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from sampler_service.core.sizing import kv_bytes_per_token, measured_cache
from tests.support.models import make_model
from tests.unit.modeling.test_families import load
from tinsmith.modeling.adaptation import adapt
from tinsmith.modeling.adapter import AdapterConfig, Target, num_elements
from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.pretrained import auto_class
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning import shape
from tinsmith_cli.planning.shape import FAMILIES, Matrix, Shape, of_config, read

CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral", "gpt_oss": "GptOss", "deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe",
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
    assert shape.stored_parameters(tmp_path) == 8000
    index.write_text(json.dumps({"metadata": {"total_size": 16_000, "total_parameters": 9000}}))
    assert shape.stored_parameters(tmp_path) == 9000
    index.write_text("{")
    assert shape.stored_parameters(tmp_path) is None


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
