"""sl_loop and rl_loop, unmodified, against a real `tinsmith up`: `make test-recipes`.

Each recipe is killed after a checkpoint and started again, as a user would after a crash: it has to go on from there.
"""

from pathlib import Path

import pytest

from tests.recipes.harness import MODEL, Recipe, check_end, check_log

pytestmark = [pytest.mark.recipes, pytest.mark.timeout(1200)]

SAVE_EVERY = 5
KILL_AFTER = 10


def run_with_a_crash(recipe: Recipe, tmp_path: Path) -> None:
    """Kills the recipe once the checkpoint of step KILL_AFTER is there, and runs it again to its end."""
    recipe.kill_after_checkpoint(f"{KILL_AFTER:06d}", tmp_path / "first.log")
    second_log = tmp_path / "second.log"
    check_end(recipe.start(second_log), second_log)
    check_log(second_log)
    output = second_log.read_text()
    assert f"Resuming from batch {KILL_AFTER}" in output
    assert "Training completed" in output
    saved = recipe.checkpoints()
    assert saved == sorted(saved)  # the second run saves the step that it resumes from once more
    assert saved[-1] == "final"


def test_sl_loop_lowers_the_loss_and_resumes(base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "model_name": MODEL,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "max_steps": 30,
        "save_every": SAVE_EVERY,
    }
    recipe = Recipe("sl_loop", settings, tmp_path / "run", base_url)
    run_with_a_crash(recipe, tmp_path)
    losses = recipe.metric("train_mean_nll")
    assert len(losses) == 30
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    # The optimizer and the weights came back: the loss goes on where it was.
    assert losses[KILL_AFTER] < losses[0]


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "cispo", "gspo", "stable_reinforce"])
def test_rl_loop_raises_the_reward_and_resumes(loss_fn: str, base_url: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "model_name": MODEL,
        "batch_size": 16,
        "group_size": 8,
        "learning_rate": 1e-3,
        "max_tokens": 32,
        "max_steps": 30,
        "save_every": SAVE_EVERY,
        "loss_fn": loss_fn,
    }
    recipe = Recipe("rl_loop", settings, tmp_path / "run", base_url)
    run_with_a_crash(recipe, tmp_path)
    rewards = recipe.metric("reward/total")
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
