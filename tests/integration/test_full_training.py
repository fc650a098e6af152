"""All parameters of a base model through the unmodified SDK: rank 0 on a stack with --full-training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from tests.support.examples import BASE_MODEL, batch, forward, new_model, random_tokens, sample, score, train
from tests.support.stack import Stack

TEXT = random_tokens(60, 7)
ADAM = tinker.AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def full_stack(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("full"), base_models=[f"{BASE_MODEL}={toy}"], flags=["--full-training"]
    ) as stack:
        yield stack


def session(stack: Stack) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test")


@pytest.mark.slow
def test_all_parameters_are_trained_published_stored_and_loaded(full_stack: Stack, tmp_path: Path) -> None:
    with session(full_stack) as service:
        client = new_model(service, 0)
        info = client.get_info()
        assert (info.is_lora, info.lora_rank) == (False, None)
        untouched = forward(client, TEXT)[0]
        losses = train(client, batch(1, lengths=(30, 12)), steps=10, adam=ADAM)
        assert losses[-1] < 0.8 * losses[0]

        first = client.save_weights_and_get_sampling_client().result()
        at_first = forward(client, TEXT)[0]
        assert np.abs(at_first - untouched).max() > 0.1  # else the comparisons would say little
        scored = score(first, TEXT)
        np.testing.assert_allclose(scored, at_first, atol=1e-4, rtol=0)
        sampled = sample(first, TEXT[:20], num_samples=2, seed=0, max_tokens=16)
        theirs = forward(client, *([*TEXT[:20], *sequence.tokens] for sequence in sampled))
        for sequence, trainer_logprobs in zip(sampled, theirs, strict=True):
            assert sequence.logprobs_np is not None
            np.testing.assert_allclose(sequence.logprobs_np, trainer_logprobs[19:], atol=1e-4, rtol=0)

        train(client, batch(2), steps=1, adam=ADAM)
        second = client.save_weights_and_get_sampling_client().result()
        at_second = forward(client, TEXT)[0]
        np.testing.assert_allclose(score(second, TEXT), at_second, atol=1e-4, rtol=0)
        assert np.abs(at_second - at_first).max() > 1e-3
        assert np.array_equal(score(first, TEXT), scored), "an older version does not change"

        state = client.save_state("one").result().path
        expected = train(client, batch(3), steps=2, adam=ADAM)
        kept = client.save_weights_for_sampler("kept").result().path
        at_end = forward(client, TEXT)[0]
        rest = tinker.RestClient(base_url=full_stack.base_url, api_key="tml-test")
        stored = rest.get_weights_info_by_tinker_path(state).result()
        assert (stored.is_lora, stored.lora_rank) == (False, None)
        run = rest.get_training_run_by_tinker_path(state).result()
        assert (run.is_lora, run.lora_rank) == (False, None)

        new_model(service, 0)  # parks the first one, which comes back below
        with pytest.raises(tinker.RequestFailedError, match=r"lora_config\.rank: 4 asks for an adapter.*send rank 0"):
            new_model(service, 4)
        with pytest.raises(tinker.RequestFailedError, match=r"lora_config\.train_mlp: false is not possible"):
            new_model(service, 0, train_mlp=False)
        external = client.save_weights_external("download").result().path
        for name, url in rest.get_external_weights_urls(external).result().urls.items():
            (tmp_path / name).write_bytes(httpx.get(url).content)

    with torch.no_grad():
        table = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([TEXT])).logits[0].log_softmax(-1)
    downloaded = table[:-1].gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    np.testing.assert_allclose(downloaded.numpy(), at_end, atol=1e-4, rtol=0)

    with session(full_stack) as service:  # the first session has ended, and its model with it
        fresh = new_model(service, 0)
        assert np.array_equal(forward(fresh, TEXT)[0], untouched), "the next model starts from the base model"
    with session(full_stack) as service:
        again = service.create_training_client_from_state_with_optimizer(state).result()
        np.testing.assert_allclose(forward(again, TEXT)[0], at_second, atol=1e-6, rtol=0)
        np.testing.assert_allclose(train(again, batch(3), steps=2, adam=ADAM), expected, rtol=1e-5)
        sampler = service.create_sampling_client(model_path=kept).result()
        np.testing.assert_allclose(score(sampler, TEXT), at_end, atol=1e-4, rtol=0)


def test_without_the_flag_rank_0_is_refused_by_name(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"lora_config\.rank: 0 means full-parameter.*--full-training"):
        new_model(service, 0)
