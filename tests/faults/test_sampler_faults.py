"""Samplers that are killed, or stopped, in the middle of work."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tinker
from tinker import ModelInput, SamplingParams

from tests.faults.cluster import Cluster
from tests.integration.examples import BASE_MODEL, batch, forward, new_model, random_tokens, train

pytestmark = pytest.mark.slow


def test_killing_a_sampler_in_the_middle_of_64_generations(cluster: Cluster, service: tinker.ServiceClient) -> None:
    client = new_model(service)
    train(client, batch(1), steps=2)
    sampler = client.save_weights_and_get_sampling_client().result()
    params = SamplingParams(max_tokens=200, stop=[])
    prompts = [random_tokens(20, n) for n in range(64)]
    pending = [sampler.sample(ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    time.sleep(1.0)
    cluster.samplers[0].kill()
    results = [future.result().sequences[0] for future in pending]
    scores = forward(client, *([*prompt, *one.tokens] for prompt, one in zip(prompts, results, strict=True)))
    for prompt, one, score in zip(prompts, results, scores, strict=True):
        assert one.logprobs_np is not None
        assert np.abs(one.logprobs_np - score[len(prompt) - 1 :]).max() < 1e-4
    assert BASE_MODEL
