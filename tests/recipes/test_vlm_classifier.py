"""vlm_classifier, unmodified, with the renderer qwen3_vl, on generated pictures: `make test-recipes`.

The pictures show one of eight figures. They are in the hub under the name of the recipe's own data set.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.harness import HUB, SEEING, Recipe, check_end, check_log, run_module
from tests.support.stack import Stack

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(600)]

CHANCE = 1 / 8


@pytest.fixture
def seeing_url(tmp_path: Path) -> Iterator[str]:
    model = f"{SEEING}={HUB / 'qwen3_vl_model'}"
    with Stack(tmp_path / "state", base_models=[model], threads=None) as stack:
        yield stack.base_url


def test_the_accuracy_rises_clearly_above_chance(seeing_url: str, tmp_path: Path) -> None:
    log, experiments = tmp_path / "log", tmp_path / "experiments"
    settings: dict[str, object] = {
        "model_name": SEEING,
        "renderer_name": "qwen3_vl",
        "experiment_dir": experiments,
        "base_url": seeing_url,
        "learning_rate": 3e-3,
        "num_epochs": 3,
        "save_every": 0,
        "eval_every": 47,  # before the first step and before the last
        "max_tokens": 16,
        "n_eval": 64,
    }
    check_end(run_module("vlm_classifier.train", settings, base_url=seeing_url, output=log), log)
    check_log(log)
    (folder,) = experiments.iterdir()
    recipe = Recipe("vlm_classifier.train", settings, folder, seeing_url)
    assert recipe.checkpoints()[-1] == "final"
    losses = recipe.metric("train_mean_nll")
    assert losses[-1] < losses[0]
    accuracies = [row["accuracy"] for row in recipe.rows("metrics.jsonl") if "accuracy" in row]
    print("accuracy", accuracies)
    assert all(math.isfinite(row["test/nll"]) for row in recipe.rows("metrics.jsonl") if "test/nll" in row)
    assert accuracies[0] < 2 * CHANCE
    assert accuracies[-1] > 3 * CHANCE
