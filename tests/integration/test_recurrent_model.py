"""A Qwen3.5 text model through the unmodified SDK: trained, published and sampled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
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
from tests.support.models import make_recurrent_model
from tests.support.stack import Stack

TEXT = random_tokens(60, 7)


@pytest.fixture(scope="module")
def recurrent_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = make_recurrent_model(tmp_path_factory.mktemp("model"), vocab_size=NUM_WORDS)
    with Stack(tmp_path_factory.mktemp("recurrent"), base_models=[f"{BASE_MODEL}={folder}"]) as stack:
        yield stack


@pytest.mark.slow
def test_a_model_with_recurrent_layers_is_trained_and_sampled(recurrent_stack: Stack) -> None:
    with tinker.ServiceClient(base_url=recurrent_stack.base_url, api_key="tml-test") as service:
        clients = [new_model(service, seed=seed) for seed in (1, 2)]
        for n, client in enumerate(clients):
            losses = train(client, batch(n, lengths=(30, 12)), steps=10)
            assert losses[-1] < 0.9 * losses[0]
        published = [client.save_weights_and_get_sampling_client().result() for client in clients]
        for client, sampler in zip(clients, published, strict=True):
            np.testing.assert_allclose(score(sampler, TEXT), forward(client, TEXT)[0], atol=1e-4, rtol=0)
            drawn = sample(sampler, TEXT[:20], num_samples=3, seed=0, max_tokens=16)
            theirs = forward(client, *([*TEXT[:20], *sequence.tokens] for sequence in drawn))
            for sequence, logprobs in zip(drawn, theirs, strict=True):
                assert sequence.logprobs_np is not None
                np.testing.assert_allclose(sequence.logprobs_np, logprobs[19:], atol=1e-4, rtol=0)
        assert np.abs(score(published[0], TEXT) - score(published[1], TEXT)).max() > 0.01
