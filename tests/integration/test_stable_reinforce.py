"""Losses that the server computes from what it knows: stable_reinforce from records, custom ones from a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import ModelInput, PromptProvenanceSpan, RequestFailedError, SampledProvenanceSpan, SamplingParams

from tests.support.examples import ADAM, PROMPT, batch, forward, logprobs, new_model, train

PARAMS = SamplingParams(max_tokens=12, stop=[], seed=1)


def datum_of(sequence: tinker.SampledSequence, advantage: float, **inputs: Sequence[float]) -> tinker.Datum:
    """The sampled tokens, predicted from the prompt and each other."""
    assert sequence.sequence_id is not None
    tokens, name = [*PROMPT, *sequence.tokens], sequence.sequence_id
    num_prompt, num_sampled = len(PROMPT), len(sequence.tokens)
    advantages = [0.0] * (num_prompt - 1) + [advantage] * num_sampled
    return tinker.Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "advantages": advantages, **inputs},  # type: ignore[dict-item]
    ).with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=name, length=num_prompt),
            SampledProvenanceSpan(sequence_id=name, length=num_sampled - 1),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=name, offset=1, length=num_prompt - 1),
            SampledProvenanceSpan(sequence_id=name, length=num_sampled),
        ],
    )


@pytest.fixture(scope="module")
def client(service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = new_model(service, seed=9)
    train(client, batch(9), steps=2)
    return client


@pytest.fixture(scope="module")
def sequences(client: tinker.TrainingClient) -> Sequence[tinker.SampledSequence]:
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
    return sampler.sample(ModelInput.from_ints(PROMPT), 4, PARAMS).result().sequences


def test_stable_reinforce_trains_on_what_the_sampler_recorded(
    client: tinker.TrainingClient, sequences: Sequence[tinker.SampledSequence]
) -> None:
    """No logprobs are sent, and some steps later the loss is the documented one of the recorded logprobs."""
    train(client, batch(8), steps=3)
    advantages = [1.0, -1.0, 0.5, -0.5]
    data = [datum_of(sequence, a) for sequence, a in zip(sequences, advantages, strict=True)]
    config = {"kl_coeff": 0.1, "ratio_cap": 1.5}
    result = client.forward_backward(data, "stable_reinforce", config).result()
    expected = 0.0
    for sequence, a, p in zip(sequences, advantages, logprobs(result), strict=True):
        gap = p[len(PROMPT) - 1 :] - np.array(sequence.logprobs)
        expected += (0.05 * gap**2 - np.minimum(np.exp(gap), 1.5) * a).sum()
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    metrics = client.optim_step(ADAM).result().metrics
    assert metrics is not None
    assert metrics["grad_norm:mean"] > 0


def test_a_token_of_weight_0_adds_nothing(
    service: tinker.ServiceClient, client: tinker.TrainingClient, sequences: Sequence[tinker.SampledSequence]
) -> None:
    """Not even where its advantage would be refused, as that of a token of the prompt."""
    state = client.save_state("masked").result().path
    num_prompt, num_sampled = len(PROMPT) - 1, len(sequences[0].tokens)
    weights = [0.0] * (num_prompt + 4) + [1.0] * (num_sampled - 4)
    found = []
    for ignored in (0.0, 100.0):
        advantages = [ignored] * (num_prompt + 4) + [1.0] * (num_sampled - 4)
        other = service.create_training_client_from_state(state).result()
        data = [datum_of(sequences[0], 1.0, advantages=advantages, weights=weights)]
        output = other.forward_backward(data, "stable_reinforce").result()
        gap = logprobs(output)[0][num_prompt + 4 :] - np.array(sequences[0].logprobs)[4:]
        wanted = (0.05 * gap**2 - np.minimum(np.exp(gap), 2.0)).sum()
        assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4)
        norm = other.optim_step(ADAM).result().metrics["grad_norm:mean"]
        found.append((output.metrics["loss:sum"], norm, *forward(other, PROMPT)[0]))
    assert found[0] == found[1]


def test_logprobs_may_be_sent_too_and_must_be_the_recorded_ones(
    client: tinker.TrainingClient, sequences: Sequence[tinker.SampledSequence]
) -> None:
    own = [0.0] * (len(PROMPT) - 1) + list(sequences[0].logprobs or [])
    loss = client.forward([datum_of(sequences[0], 1.0, logprobs=own)], "stable_reinforce").result().metrics["loss:sum"]
    again = client.forward([datum_of(sequences[0], 1.0)], "stable_reinforce").result().metrics["loss:sum"]
    assert loss == again
    own[-1] -= 0.1
    with pytest.raises(RequestFailedError, match="which the sampler recorded"):
        client.forward([datum_of(sequences[0], 1.0, logprobs=own)], "stable_reinforce").result()


def test_tokens_that_were_not_sampled_cannot_be_trained_on(
    client: tinker.TrainingClient, sequences: Sequence[tinker.SampledSequence]
) -> None:
    sampler = client.save_weights_and_get_sampling_client().result()
    (unrecorded,) = sampler.sample(ModelInput.from_ints(PROMPT), 1, PARAMS).result().sequences
    changed = datum_of(sequences[0], 1.0, target_tokens=[*PROMPT[1:], *sequences[1].tokens])
    bare = tinker.Datum(
        model_input=ModelInput.from_ints(PROMPT),
        loss_fn_inputs={"target_tokens": PROMPT, "advantages": [1.0] * len(PROMPT)},  # type: ignore[dict-item]
    )
    for data, part in (
        (datum_of(unrecorded, 1.0), "record_stability_info=True"),
        (changed, "holds token"),
        (bare, "with_provenance"),
    ):
        with pytest.raises(RequestFailedError, match=part):
            client.forward([data], "stable_reinforce").result()
    prompt_too = datum_of(sequences[0], 1.0, advantages=[1.0] * (len(PROMPT) + 11))
    with pytest.raises(RequestFailedError, match="not sampled"):
        client.forward([prompt_too], "stable_reinforce").result()


# Custom losses


def entropy_like(p: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    surprise = torch.exp(p).clamp(max=0.9) * weights
    loss = (surprise * p).sum()
    return loss, {"custom/surprise:mean": surprise.sum(), "custom/count:sum": weights.sum()}


def on_the_server(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return entropy_like(logprobs, weights)


def on_the_client(data: list[tinker.Datum], logprobs_list: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    both = [entropy_like(p, d.loss_fn_inputs["weights"].to_torch()) for d, p in zip(data, logprobs_list, strict=True)]
    return torch.stack([loss for loss, _ in both]).sum(), {}


def test_a_custom_loss_on_the_server_is_that_of_the_client(service: tinker.ServiceClient) -> None:
    handle = service.create_custom_loss(on_the_server, input_ranks={"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is not None
    data = batch(3)
    losses: list[Any] = [handle, on_the_client]
    results = []
    for loss in losses:
        client = new_model(service, seed=2)
        train(client, batch(2), steps=1)
        result = client.forward_backward_custom(data, loss).result()
        step = client.optim_step(ADAM).result()
        results.append((result, step, forward(client, PROMPT)[0]))
    (server, server_step, server_after), (local, local_step, local_after) = results
    assert server.metrics["loss:sum"] == pytest.approx(local.metrics["loss:sum"], rel=1e-5)
    for one, other in zip(logprobs(server), logprobs(local), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert server_step.metrics["grad_norm:mean"] == pytest.approx(local_step.metrics["grad_norm:mean"], rel=1e-4)
    np.testing.assert_allclose(server_after, local_after, atol=1e-4)
    assert server.metrics["custom/count:sum"] == sum(len(each.loss_fn_inputs["weights"].data) for each in data)
    assert "custom/surprise:mean" in server.metrics


def test_a_graph_that_the_server_does_not_allow_is_refused(service: tinker.ServiceClient) -> None:
    def leaves_the_graph(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.ones(()) * torch.hub.load("a/b", "c"), {}

    with pytest.raises((RequestFailedError, ValueError)):
        service.create_custom_loss(leaves_the_graph, input_ranks={"logprobs": 1}).result()

    def reads_a_file(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return logprobs.sum() + torch.from_file("/etc/passwd", size=1).sum() * logprobs.sum(), {}

    with pytest.raises((RequestFailedError, ValueError)):
        service.create_custom_loss(reads_a_file, input_ranks={"logprobs": 1}).result()
