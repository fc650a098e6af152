"""The table of docs/decisions/quantized-base.md is what the planner computes from each model's config.json."""

import json
from pathlib import Path

import pytest

from tinsmith_cli.planning.families import of_config
from tinsmith_cli.planning.memory import base_bytes

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "decisions" / "quantized-base.md").read_text()


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-32B", "Llama-3.1-70B"])
def test_the_memory_of_a_model_is_as_computed(model: str) -> None:
    config = json.loads((ROOT / "tests" / "support" / "plans" / "models" / f"{model}.json").read_text())
    shape = of_config(config, name=model)
    cells = [
        f"{base_bytes(shape, dtype, quantised=form) / 1e9:.1f}"
        for dtype in ("float32", "bfloat16")
        for form in ("", "int8", "nf4")
    ]
    assert f"\n| {' | '.join([model, *cells])} |\n" in PAGE
