"""Recipes with the models that they have as defaults, Qwen3.5 in its published form: `make test-recipes`.

No `model_name` is given. Batches are small, and the rates are those of a tiny model.
"""

import math
from pathlib import Path

import pytest

from tests.recipes.harness import Recipe, check_end, check_log

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(600)]


def test_sl_loop(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"batch_size": 16, "learning_rate": 3e-3, "max_steps": 8, "save_every": 0}
    recipe = Recipe("sl_loop", settings, tmp_path / "run", base_url)
    run(recipe, tmp_path)
    losses = recipe.metric("train_mean_nll")
    assert len(losses) == 8
    assert losses[-1] < 0.8 * losses[0]


def test_rl_loop(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "batch_size": 8,
        "group_size": 8,
        "learning_rate": 1e-3,
        "max_tokens": 32,
        "max_steps": 10,
        "save_every": 0,
    }
    recipe = Recipe("rl_loop", settings, tmp_path / "run", base_url)
    run(recipe, tmp_path)
    rewards = recipe.metric("reward/total")
    assert len(rewards) == 10
    assert max(rewards) > 0


def run(recipe: Recipe, tmp_path: Path) -> None:
    """To its end. The loops write another last line than Recipe.run expects of recipes in folders."""
    log = tmp_path / "log"
    check_end(recipe.start(log), log)
    check_log(log)
    assert recipe.checkpoints()[-1] == "final"


def test_math_rl(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "groups_per_batch": 8,
        "group_size": 8,
        "learning_rate": 1e-3,
        "max_tokens": 12,  # the template lets the model think, and an answer has up to four tokens after that
        "max_steps": 4,
        "eval_every": 0,
        "save_every": 0,
    }
    recipe = Recipe("math_rl.train", settings, tmp_path / "run", base_url)
    recipe.run(tmp_path / "log")
    assert len(recipe.metric("env/all/reward/total")) == 4
    assert max(map(abs, recipe.metric("optim/kl_sample_train_v2"))) < 1e-6


def test_dpo(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"batch_size": 8, "max_steps": 6, "learning_rate": 3e-4}
    recipe = Recipe("preference.dpo.train", settings, tmp_path / "run", base_url)
    recipe.run(tmp_path / "log")
    losses = recipe.metric("dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < losses[0] - 0.05


def test_rubric(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "groups_per_batch": 8,
        "train_group_size": 4,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "eval_every": 0,
        "save_every": 0,
    }
    recipe = Recipe("rubric.train", settings, tmp_path / "run", base_url)
    output = recipe.run(tmp_path / "log")
    # The grader's 96 answers are drawn, so a few may be in another form.
    assert output.count("Failed to extract score") < 10
    scores = recipe.metric("env/all/rubric_score")
    assert len(scores) == 3
    assert 0 < sum(scores) / 3 < 1
    assert max(map(abs, recipe.metric("optim/kl_sample_train_v2"))) < 1e-6
