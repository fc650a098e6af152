"""Training data and prompts of the tests, in the SDK's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker
from tinker import ModelInput, SamplingParams

Floats = np.ndarray

NUM_WORDS = 2000
"""Token ids below this are in every toy model's vocabulary, and none of them is a special token's."""
BASE_MODEL = "tests/tiny"
"""Public name of the one that the shared stack serves."""
ADAM = tinker.AdamParams(learning_rate=1e-3)


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(NUM_WORDS, size=length).tolist()


PROMPT = random_tokens(11, 7)


def new_model(
    service: tinker.ServiceClient, rank: int = 8, *, seed: int | None = 0, **settings: Any
) -> tinker.TrainingClient:
    """`settings`: train_attn, train_mlp, train_unembed, user_metadata."""
    return service.create_lora_training_client(BASE_MODEL, rank=rank, seed=seed, **settings).result()


def next_token_datum(tokens: Sequence[int], **inputs: object) -> tinker.Datum:
    """Predict each token from those before it. `inputs`: arrays of len(tokens) - 1; weights are ones unless given."""
    return tinker.Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **(inputs or {"weights": _ones(tokens)})},  # type: ignore[dict-item]
    )


def _ones(tokens: Sequence[int]) -> Floats:
    return np.ones(len(tokens) - 1, np.float32)


def batch(seed: int, lengths: Sequence[int] = (9, 17, 5)) -> list[tinker.Datum]:
    """Random texts, to be learnt by heart."""
    return [next_token_datum(random_tokens(length, 100 * seed + n)) for n, length in enumerate(lengths)]


def logprobs(output: tinker.ForwardBackwardOutput) -> list[Floats]:
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]


def forward(client: tinker.TrainingClient, *sequences: Sequence[int]) -> list[Floats]:
    """The trainer's log P of each token but the first."""
    data = [next_token_datum(tokens) for tokens in sequences]
    return logprobs(client.forward(data, "cross_entropy").result())


def train(
    client: tinker.TrainingClient, data: list[tinker.Datum], *, steps: int, adam: tinker.AdamParams = ADAM
) -> list[float]:
    """The loss at each step, before it; all is submitted before the first result is asked for."""
    pending = [(client.forward_backward(data, "cross_entropy"), client.optim_step(adam)) for _ in range(steps)]
    losses = []
    for forward_backward, optim_step in pending:
        losses.append(forward_backward.result().metrics["loss:sum"])
        optim_step.result()
    return losses


def sample(
    client: tinker.SamplingClient, prompt: Sequence[int], *, num_samples: int = 1, **params: object
) -> list[tinker.SampledSequence]:
    """`params`: of SamplingParams; without a stop, nothing but max_tokens (12 unless given) ends a sequence."""
    settings = SamplingParams(**{"max_tokens": 12, "stop": [], **params})  # type: ignore[arg-type]
    return list(client.sample(ModelInput.from_ints(list(prompt)), num_samples, settings).result().sequences)


def score(client: tinker.SamplingClient, tokens: Sequence[int]) -> Floats:
    """The sampler's log P of each token but the first."""
    found = client.compute_logprobs(ModelInput.from_ints(list(tokens))).result()
    assert found[0] is None
    return np.array(found[1:], np.float32)
