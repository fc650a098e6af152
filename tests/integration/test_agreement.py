"""The sampler is the trainer, a version is immutable, and my numbers do not depend on my neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from tests.support.examples import BASE_MODEL, batch, forward, new_model, random_tokens, sample, score, train
from tests.support.stack import Stack

PROMPTS = [random_tokens(length, 50 + length) for length in (1, 7, 40)]
FAST = tinker.AdamParams(learning_rate=5e-3)
"""Some steps of it leave a model that is far from the base model."""


def largest_gap(client: tinker.TrainingClient, sampler: tinker.SamplingClient) -> float:
    """Between the sampler's logprobs and the trainer's, over sampled tokens at temperature 1."""
    gaps = []
    for prompt in PROMPTS:
        sequences = sample(sampler, prompt, num_samples=3, seed=0, max_tokens=24)
        theirs = forward(client, *([*prompt, *sequence.tokens] for sequence in sequences))
        for sequence, trainer_logprobs in zip(sequences, theirs, strict=True):
            assert sequence.logprobs_np is not None
            gaps.append(np.abs(sequence.logprobs_np - trainer_logprobs[len(prompt) - 1 :]).max())
    return float(max(gaps))


def test_the_base_model_scores_its_samples_as_the_trainer_does(service: tinker.ServiceClient) -> None:
    untrained = new_model(service, 8)
    assert largest_gap(untrained, service.create_sampling_client(base_model=BASE_MODEL).result()) < 1e-4


@pytest.mark.parametrize("rank", [8, 32])
def test_a_published_adapter_scores_its_samples_as_the_trainer_does(rank: int, service: tinker.ServiceClient) -> None:
    client = new_model(service, rank)
    before = forward(client, PROMPTS[-1])[0]
    train(client, batch(1, lengths=(30, 12, 25)), steps=6, adam=FAST)
    after = forward(client, PROMPTS[-1])[0]
    assert np.abs(after - before).max() > 0.5  # else the comparison would say little
    sampler = client.save_weights_and_get_sampling_client().result()
    assert largest_gap(client, sampler) < 1e-4
    np.testing.assert_allclose(score(sampler, PROMPTS[-1]), after, atol=1e-4, rtol=0)


def test_tenants_that_train_together_get_what_each_gets_alone(service: tinker.ServiceClient) -> None:
    settings = [(4, 1, batch(2, lengths=(20, 11))), (16, 2, batch(3, lengths=(7, 33, 15))), (8, 3, batch(4))]
    alone = [train(new_model(service, rank, seed=seed), data, steps=6) for rank, seed, data in settings]
    clients = [new_model(service, rank, seed=seed) for rank, seed, _ in settings]
    pending = []
    for _ in range(6):
        for client, (_, _, data) in zip(clients, settings, strict=True):
            pending.append(client.forward_backward(data, "cross_entropy"))
            client.optim_step(tinker.AdamParams(learning_rate=1e-3))
    losses = [one.result().metrics["loss:sum"] for one in pending]
    for n, wanted in enumerate(alone):
        np.testing.assert_allclose(losses[n :: len(settings)], wanted, rtol=1e-5)


def test_weight_decay_of_one_tenant_leaves_the_other_untouched(service: tinker.ServiceClient) -> None:
    mine, theirs = new_model(service, 8, seed=1), new_model(service, 8, seed=2)
    for client in (mine, theirs):
        train(client, batch(5), steps=3, adam=FAST)
    sampler = mine.save_weights_and_get_sampling_client().result()
    sampled, scored, trained = (
        sample(sampler, PROMPTS[1], seed=0),
        score(sampler, PROMPTS[1]),
        forward(mine, PROMPTS[1]),
    )
    their_scores = forward(theirs, PROMPTS[1])[0]
    train(theirs, batch(5), steps=3, adam=tinker.AdamParams(learning_rate=5e-3, weight_decay=10.0))
    assert np.abs(forward(theirs, PROMPTS[1])[0] - their_scores).max() > 1e-2
    np.testing.assert_array_equal(forward(mine, PROMPTS[1]), trained)
    for client in (sampler, mine.save_weights_and_get_sampling_client().result()):
        assert sample(client, PROMPTS[1], seed=0)[0].tokens == sampled[0].tokens
        assert sample(client, PROMPTS[1], seed=0)[0].logprobs == sampled[0].logprobs
        np.testing.assert_array_equal(score(client, PROMPTS[1]), scored)


def test_an_older_sampling_client_does_not_move_while_training_goes_on(service: tinker.ServiceClient) -> None:
    client = new_model(service, 8)
    train(client, batch(6), steps=2, adam=FAST)
    older = client.save_weights_and_get_sampling_client().result()
    wanted = sample(older, PROMPTS[1], num_samples=2, seed=4)
    scored = score(older, PROMPTS[1])
    for _ in range(3):
        train(client, batch(6), steps=1, adam=FAST)
        newer = client.save_weights_and_get_sampling_client().result()
        client.forward_backward(batch(6), "cross_entropy")  # runs while the older one is asked
        for found, sequence in zip(sample(older, PROMPTS[1], num_samples=2, seed=4), wanted, strict=True):
            assert (found.tokens, found.logprobs) == (sequence.tokens, sequence.logprobs)
        np.testing.assert_array_equal(score(older, PROMPTS[1]), scored)
        assert not np.array_equal(score(newer, PROMPTS[1]), scored)


def test_sampling_never_changes_the_trainer(service: tinker.ServiceClient) -> None:
    client, twin = new_model(service, 8), new_model(service, 8)
    for one in (client, twin):
        train(one, batch(7), steps=2, adam=FAST)
    before = forward(client, *PROMPTS[1:])
    client.forward_backward(batch(8), "cross_entropy").result()
    sampler = client.save_weights_and_get_sampling_client().result()
    sample(sampler, PROMPTS[1], num_samples=4, max_tokens=30)
    sample(service.create_sampling_client(base_model=BASE_MODEL).result(), PROMPTS[1], num_samples=4)
    for found, wanted in zip(forward(client, *PROMPTS[1:]), before, strict=True):
        np.testing.assert_array_equal(found, wanted)
    twin.forward_backward(batch(8), "cross_entropy").result()  # the pending gradient is still there, too
    steps = [one.optim_step(FAST).result().metrics["grad_norm:mean"] for one in (client, twin)]
    assert steps[0] == steps[1]
    np.testing.assert_array_equal(forward(client, PROMPTS[1]), forward(twin, PROMPTS[1]))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of peft: it is about merging
def test_a_saved_adapter_is_the_same_model_in_peft(service: tinker.ServiceClient, stack: Stack, toy: Path) -> None:
    client = new_model(service, 8)
    train(client, batch(9), steps=5, adam=FAST)
    path = client.save_weights_for_sampler("for-peft").result().path
    folder = stack.checkpoints / path.removeprefix("tinker://")
    model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(model, folder).eval()
    for tokens in PROMPTS[1:]:
        with torch.no_grad():
            table = adapted(torch.tensor([tokens])).logits[0].log_softmax(-1)
        wanted = table[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(forward(client, tokens)[0], wanted, atol=1e-5, rtol=0)
