"""`tinsmith up --quantize nf4`: trained, published and sampled through the unmodified SDK, also after kill -9."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker

from tests.support.examples import (
    BASE_MODEL,
    NUM_WORDS,
    batch,
    forward,
    new_model,
    random_tokens,
    sample,
    score,
    train,
)
from tests.support.models import make_model, make_sparse_model
from tests.support.stack import Stack

TEXT = random_tokens(60, 7)


def service(stack: Stack, kind: str) -> psutil.Process:
    (found,) = stack.processes(f"{kind}_service")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_quantised_base_is_trained_sampled_and_the_same_after_a_kill(tmp_path: Path, quantize: str) -> None:
    make = make_model if quantize == "nf4" else make_sparse_model
    folder = make(tmp_path / "model", vocab_size=NUM_WORDS)
    flags = ["--quantize", quantize]
    with (
        Stack(tmp_path / "state", base_models=[f"{BASE_MODEL}={folder}"], flags=flags) as stack,
        tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as client,
    ):
        model = new_model(client, seed=1)
        losses = train(model, batch(0, lengths=(30, 12)), steps=10)
        assert losses[-1] < 0.9 * losses[0]
        sampler = model.save_weights_and_get_sampling_client().result()
        before = score(sampler, TEXT)
        np.testing.assert_allclose(before, forward(model, TEXT)[0], atol=1e-4, rtol=0)
        (drawn,) = sample(sampler, TEXT[:20], num_samples=1, seed=0, max_tokens=16)
        theirs = forward(model, [*TEXT[:20], *drawn.tokens])[0]
        assert drawn.logprobs_np is not None
        np.testing.assert_allclose(drawn.logprobs_np, theirs[19:], atol=1e-4, rtol=0)
        for process in [service(stack, kind) for kind in ("trainer", "sampler")]:
            process.kill()
        np.testing.assert_allclose(forward(model, TEXT)[0], before, atol=1e-4, rtol=0)
        again = model.save_weights_and_get_sampling_client().result()
        np.testing.assert_allclose(score(again, TEXT), before, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_sampler_with_other_numbers_than_the_trainers_takes_no_version(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", vocab_size=NUM_WORDS)
    env = {"TRAINER_QUANTIZE": "nf4", "SAMPLER_QUANTIZE": "int8"}
    with (
        Stack(tmp_path / "state", base_models=[f"{BASE_MODEL}={folder}"], env=env) as stack,
        tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as client,
    ):
        model = new_model(client, seed=1)
        reason = "the trainer's base weights are quantised to nf4, this sampler's are quantised to int8; set TRAINER_QU"
        with pytest.raises(tinker.TinkerError, match=reason):
            model.save_weights_and_get_sampling_client().result()
