"""The cookbook's other recipes, unmodified, against a real `tinsmith up`: `make test-recipes`."""

import json
import math
from pathlib import Path

import pytest

from tests.recipes.harness import MODEL, Recipe, check_end, check_log, run_module

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(600)]


def test_sl_basic_lowers_the_loss(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"model_name": MODEL, "learning_rate": 3e-3, "max_steps": 6, "eval_every": 4}
    recipe = Recipe("sl_basic", settings, tmp_path / "run", base_url)
    recipe.run(tmp_path / "log")
    losses = recipe.metric("train_mean_nll")
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]


def test_chat_sl_resumes_after_a_crash(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "model_name": MODEL,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "max_steps": 16,
        "save_every": 4,
        "eval_every": 8,
        "max_length": 512,
        "behavior_if_log_dir_exists": "resume",
    }
    recipe = Recipe("chat_sl.train", settings, tmp_path / "run", base_url)
    recipe.kill_after_checkpoint("000008", tmp_path / "first.log")
    assert "Resum" in recipe.run(tmp_path / "second.log")
    losses = recipe.metric("train_mean_nll")
    assert len(losses) == 16
    assert losses[8] < losses[0]
    assert losses[-1] < 0.5 * losses[0]


def test_rl_basic_runs_and_its_policies_agree(base_url: str, tmp_path: Path) -> None:
    builder = "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"
    settings: dict[str, object] = {
        "model_name": MODEL,
        "dataset_builder": builder,
        "dataset_builder.batch_size": 8,
        "dataset_builder.group_size": 8,
        "dataset_builder.renderer_name": "qwen3",
        "dataset_builder.model_name_for_tokenizer": MODEL,
        "learning_rate": 1e-3,
        "max_tokens": 32,
        "max_steps": 4,
    }
    recipe = Recipe("rl_basic", settings, tmp_path / "run", base_url)
    recipe.run(tmp_path / "log")
    assert len(recipe.metric("env/all/reward/total")) == 4
    # The sampler is the trainer: the recipe's own measure of the gap between them.
    assert max(map(abs, recipe.metric("optim/kl_sample_train_v2"))) < 1e-6


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_math_rl_learns_arithmetic(is_async: bool, base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "model_name": MODEL,
        "groups_per_batch": 16,
        "group_size": 8,
        "learning_rate": 1e-3,
        "max_steps": 12,
        "eval_every": 0,
        "save_every": 6,
        **({"max_steps_off_policy": 2} if is_async else {}),
    }
    recipe = Recipe("math_rl.train", settings, tmp_path / "run", base_url)
    recipe.run(tmp_path / "log")
    rewards = recipe.metric("env/all/reward/total")
    assert len(rewards) == 12
    # The reward is -0.1 for an answer in the wrong form: it learns the form first.
    assert sum(rewards[-3:]) / 3 > rewards[0]


def test_the_loss_of_dpo_starts_at_ln_2_and_falls(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"model_name": MODEL, "batch_size": 8, "max_steps": 6, "learning_rate": 3e-4}
    recipe = Recipe("preference.dpo.train", settings, tmp_path / "run", base_url)
    recipe.run(tmp_path / "log")
    losses = recipe.metric("dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < losses[0] - 0.05


def test_prompt_distillation_makes_its_data_and_learns_it(base_url: str, tmp_path: Path) -> None:
    data, log = tmp_path / "data.jsonl", tmp_path / "data.log"
    name = "prompt_distillation.create_data"
    check_end(run_module(name, {"output_file": data}, base_url=base_url, output=log), log)
    check_log(log)
    answers = [json.loads(line)["messages"][-1]["content"] for line in data.read_text().splitlines()]
    assert len(answers) == 48
    assert set(answers) == {"en"}  # what the teacher always answers
    settings: dict[str, object] = {
        "model_name": MODEL,
        "file_path": data,
        "batch_size": 8,
        "num_epochs": 2,
        "eval_every": 0,
        "learning_rate": 3e-3,
    }
    recipe = Recipe("prompt_distillation.train", settings, tmp_path / "run", base_url)
    recipe.run(tmp_path / "log")
    losses = recipe.metric("train_mean_nll")
    assert losses[-1] < 0.2 * losses[0]


def test_on_policy_distillation_starts_at_a_kl_of_0_from_an_equal_teacher(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "model_name": MODEL,
        "teacher_model": MODEL,
        "groups_per_batch": 4,
        "group_size": 4,
        "max_tokens": 32,
        "max_steps": 3,
        "eval_every": 0,
        "lora_rank": 16,
    }
    recipe = Recipe("distillation.on_policy_distillation", settings, tmp_path / "run", base_url)
    recipe.run(tmp_path / "log")
    divergences = recipe.metric("teacher_kl")
    assert abs(divergences[0]) < 1e-5
    assert len(divergences) == 3


def test_sdft_runs_with_a_teacher_of_top_k_logprobs(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "model_name": MODEL,
        "groups_per_batch": 4,
        "max_tokens": 32,
        "max_steps": 4,
        "eval_every": 0,
        "lora_rank": 16,
    }
    recipe = Recipe("sdft.train", settings, tmp_path / "run", base_url)
    recipe.run(tmp_path / "log")
    entropies = recipe.metric("sdft/mean_teacher_entropy")
    assert len(entropies) == 4
    assert all(0 < entropy < 20 for entropy in entropies)
    assert all(norm > 0 for norm in recipe.metric("grad_norm:mean"))


@pytest.mark.parametrize("game", ["guess_number", "twenty_questions"])
def test_games_of_several_turns_run_to_their_end(game: str, base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "model_name": MODEL,
        "renderer_name": "qwen3_instruct",
        "batch_size": 2,
        "group_size": 4,
        "max_tokens": 16,
        "max_steps": 2,
        "eval_every": 0,
    }
    recipe = Recipe(f"multiplayer_rl.{game}.train", settings, tmp_path / "run", base_url, takes_base_url=False)
    recipe.run(tmp_path / "log")
    turns = recipe.metric("env/all/turns_per_episode")
    assert len(turns) == 2
    assert all(1 < each <= 20 for each in turns)
    assert max(map(abs, recipe.metric("optim/kl_sample_train_v2"))) < 1e-6


@pytest.mark.parametrize("opponent", ["base_model", "random"])
def test_two_players_of_one_policy_play_and_a_fixed_opponent_tests_it(
    opponent: str, base_url: str, tmp_path: Path
) -> None:
    """Tic-tac-toe by textarena: both players of a game of the training are the policy, and wait for each other."""
    settings: dict[str, object] = {
        "model_name": MODEL,
        "renderer_name": "qwen3_instruct",
        "batch_size": 16,
        "num_train_datapoints": 48,
        "num_test_datapoints": 16,
        "test_opponent": opponent,
        "max_tokens": 16,
        "eval_every": 2,
    }
    name = "multiplayer_rl.text_arena.train"
    recipe = Recipe(name, settings, tmp_path / "run", base_url, takes_base_url=False)
    recipe.run(tmp_path / "log")
    assert len(recipe.metric("env/all/reward/total")) == 3
    assert max(map(abs, recipe.metric("optim/kl_sample_train_v2"))) < 1e-6
    tested = [row[reward] for row in recipe.rows("metrics.jsonl") if (reward := "test/env/all/reward/total") in row]
    assert len(tested) >= 2
