"""Losses, gradients and optimizer steps through the SDK."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tinker
import torch
from tinker import ModelInput, TensorData

from tests.support.examples import (
    ADAM,
    PROMPT,
    batch,
    forward,
    logprobs,
    new_model,
    next_token_datum,
    random_tokens,
    train,
)


def test_forward_gives_forward_backwards_logprobs_and_no_gradient(service: tinker.ServiceClient) -> None:
    client = new_model(service)
    data = batch(4)
    only_forward = client.forward(data, "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics["grad_norm:mean"] == 0.0
    both = client.forward_backward(data, "cross_entropy").result()
    assert client.optim_step(ADAM).result().metrics["grad_norm:mean"] > 0.0
    for found, wanted in zip(logprobs(only_forward), logprobs(both), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)  # a training pass adds up in another order
    assert only_forward.metrics["loss:sum"] == pytest.approx(both.metrics["loss:sum"], rel=1e-6)
    total = -sum(float(one.sum()) for one in logprobs(both))
    assert both.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def _ratio(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.exp(p - q)


def _ppo(p: np.ndarray, q: np.ndarray, a: np.ndarray, low: float, high: float) -> np.ndarray:
    return -np.minimum(_ratio(p, q) * a, _ratio(p, q).clip(low, high) * a)


def _cispo(p: np.ndarray, q: np.ndarray, a: np.ndarray, low: float, high: float) -> np.ndarray:
    return -_ratio(p, q).clip(low, high) * p * a


def _dro(p: np.ndarray, q: np.ndarray, a: np.ndarray, beta: float) -> np.ndarray:
    return -(p * a - beta / 2 * (p - q) ** 2)


CLIP = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}


@pytest.mark.parametrize(
    ("loss_fn", "config", "formula"),
    [
        ("importance_sampling", None, lambda p, q, a: -_ratio(p, q) * a),
        ("ppo", None, lambda p, q, a: _ppo(p, q, a, 0.8, 1.2)),
        ("ppo", CLIP, lambda p, q, a: _ppo(p, q, a, 0.95, 1.05)),
        ("cispo", None, lambda p, q, a: _cispo(p, q, a, 0.0, 4.0)),
        ("cispo", CLIP, lambda p, q, a: _cispo(p, q, a, 0.95, 1.05)),
        ("dro", {"beta": 0.3}, lambda p, q, a: _dro(p, q, a, 0.3)),
    ],
)
def test_policy_losses_are_their_formulas_and_raise_what_has_an_advantage(
    loss_fn: tinker.types.LossFnType,
    config: dict[str, float] | None,
    formula: Callable[..., np.ndarray],
    service: tinker.ServiceClient,
) -> None:
    client = new_model(service)
    rng = np.random.default_rng(0)
    texts = [random_tokens(length, seed) for seed, length in enumerate((6, 12))]
    inputs = [
        {
            "logprobs": (p + rng.normal(0, 0.1, p.size)).astype(np.float32),
            "advantages": rng.normal(size=p.size).astype(np.float32),
        }
        for p in forward(client, *texts)
    ]
    data = [next_token_datum(text, **one) for text, one in zip(texts, inputs, strict=True)]
    gains = []  # what each of the losses is a surrogate for
    for _ in range(3):
        step = client.forward_backward(data, loss_fn, config), client.optim_step(tinker.AdamParams(learning_rate=1e-4))
        output = step[0].result()
        assert step[1].result().metrics["grad_norm:mean"] > 0
        wanted = sum(
            formula(p.astype(np.float64), one["logprobs"], one["advantages"]).sum()
            for p, one in zip(logprobs(output), inputs, strict=True)
        )
        assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
        gains.append(sum(float((p * one["advantages"]).sum()) for p, one in zip(logprobs(output), inputs, strict=True)))
    assert gains[0] < gains[1] < gains[2]


def _gspo(p: np.ndarray, q: np.ndarray, a: np.ndarray) -> np.ndarray:
    ratio = np.exp((p - q).mean())
    return -np.minimum(ratio * a, ratio.clip(0.8, 1.2) * a)


@pytest.mark.parametrize(
    ("loss_fn", "formula"),
    [
        ("importance_sampling", lambda p, q, a: -_ratio(p, q) * a),
        ("ppo", lambda p, q, a: _ppo(p, q, a, 0.8, 1.2)),
        ("cispo", lambda p, q, a: _cispo(p, q, a, 0.0, 4.0)),
        ("dro", lambda p, q, a: _dro(p, q, a, 0.05)),
        ("gspo", _gspo),
    ],
)
def test_a_token_of_weight_0_adds_nothing_to_a_policy_loss(
    loss_fn: tinker.types.LossFnType, formula: Callable[..., np.ndarray], service: tinker.ServiceClient
) -> None:
    """Whatever else is sent for it: the loss and the step are those of the other tokens, to the last bit."""
    rng = np.random.default_rng(0)
    text = random_tokens(12, 0)
    weights = (np.arange(11) >= 4).astype(np.float32)
    noise, advantages = (rng.normal(0, size, 11).astype(np.float32) for size in (0.1, 1))
    found = []
    for far in (0.0, 80.0):
        client = new_model(service)
        (p,) = forward(client, text)
        q = (p + noise - far * (1 - weights)).astype(np.float32)
        inputs = {"logprobs": q, "advantages": advantages + far * (1 - weights), "weights": weights}
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(11, np.float32)
        output = client.forward_backward([next_token_datum(text, **inputs)], loss_fn).result()
        norm = client.optim_step(ADAM).result().metrics["grad_norm:mean"]
        mine = formula(p.astype(np.float64)[4:], q[4:], advantages[4:]).sum()
        assert output.metrics["loss:sum"] == pytest.approx(mine, rel=1e-4, abs=1e-4)
        assert norm > 0
        found.append((output.metrics["loss:sum"], norm, *forward(client, text)[0]))
    assert found[0] == found[1]


def test_cross_entropy_weights_scale_each_token(service: tinker.ServiceClient) -> None:
    client = new_model(service)
    weights = np.array([0.0, 1.0, -2.0, 0.5], np.float32)
    output = client.forward_backward([next_token_datum(random_tokens(5, 1), weights=weights)], "cross_entropy").result()
    (p,) = logprobs(output)
    assert p.shape == (4,)  # also where the weight is 0
    assert output.metrics["loss:sum"] == pytest.approx(-float((weights * p).sum()), rel=1e-5)


def test_many_targets_for_a_position_dense_and_sparse(service: tinker.ServiceClient) -> None:
    client = new_model(service)
    rng = np.random.default_rng(1)
    num_tokens, num_targets = 6, 8
    targets = np.zeros((num_tokens, num_targets), np.int64)
    weights = np.zeros((num_tokens, num_targets), np.float32)
    targets[:, :2] = rng.integers(1, 500, (num_tokens, 2))
    weights[:, 1:3] = rng.random((num_tokens, 2))  # a target of 0 with a weight, and a target without one
    text = ModelInput.from_ints(random_tokens(num_tokens, 2))

    def run(**inputs: object) -> tuple[np.ndarray, float, float]:
        datum = tinker.Datum(text, {"target_tokens": inputs["targets"], "weights": inputs["weights"]})  # type: ignore[dict-item]
        step = client.forward_backward([datum], "cross_entropy"), client.optim_step(tinker.AdamParams(learning_rate=0))
        output = step[0].result()
        return logprobs(output)[0], output.metrics["loss:sum"], step[1].result().metrics["grad_norm:mean"]

    sparse = TensorData.from_torch_sparse(torch.tensor(targets))
    assert sparse.sparse_crow_indices is not None  # the SDK sends torch tensors of two dimensions so
    dense_p, dense_loss, dense_norm = run(targets=targets, weights=weights)
    sparse_p, sparse_loss, sparse_norm = run(targets=torch.tensor(targets), weights=torch.tensor(weights))
    assert dense_p.shape == (num_tokens, num_targets)
    np.testing.assert_array_equal(sparse_p, dense_p)
    assert (sparse_loss, sparse_norm) == (dense_loss, dense_norm)
    assert dense_loss == pytest.approx(-float((weights * dense_p).sum()), rel=1e-5)
    # The first column alone is an ordinary datum.
    ordinary = tinker.Datum(text, {"target_tokens": targets[:, 0], "weights": np.ones(num_tokens, np.float32)})
    both = client.forward(
        [tinker.Datum(text, {"target_tokens": targets, "weights": weights}), ordinary], "cross_entropy"
    ).result()
    wide, narrow = logprobs(both)
    np.testing.assert_allclose(narrow, wide[:, 0], atol=1e-5)


def test_a_call_larger_than_one_request_is_one_batch(service: tinker.ServiceClient) -> None:
    count = 4100  # the SDK sends at most 4096 datums in a request
    data = [next_token_datum(random_tokens(3, n)) for n in range(count)]
    client = new_model(service)
    both = client.forward_backward(data, "cross_entropy"), client.optim_step(tinker.AdamParams(learning_rate=0))
    output = both[0].result()
    assert len(output.loss_fn_outputs) == count
    assert output.metrics["loss:sum"] == pytest.approx(-sum(float(p.sum()) for p in logprobs(output)), rel=1e-5)
    parts = [client.forward_backward(data[n::2], "cross_entropy") for n in (0, 1)]
    again = client.optim_step(tinker.AdamParams(learning_rate=0)).result()
    assert sum(part.result().metrics["loss:sum"] for part in parts) == pytest.approx(output.metrics["loss:sum"])
    assert again.metrics["grad_norm:mean"] == pytest.approx(both[1].result().metrics["grad_norm:mean"], rel=1e-4)


def test_a_large_batch_that_failed_does_not_refuse_the_step_of_the_batch_after_it(
    service: tinker.ServiceClient,
) -> None:
    """As long as the SDK sends it in one request: one in several would leave parts that its client is not told of."""
    good = [next_token_datum(random_tokens(3, n)) for n in range(1500)]
    client, same = new_model(service), new_model(service)
    with pytest.raises(tinker.RequestFailedError, match="target_tokens"):
        client.forward_backward([next_token_datum([1, 1_000_000]), *good], "cross_entropy").result()
    norms = []
    for one in (client, same):
        one.forward_backward(good[:4], "cross_entropy").result()
        norms.append(one.optim_step(ADAM).result().metrics["grad_norm:mean"])
    assert norms[0] == norms[1]


def test_forward_backward_custom_takes_the_users_gradient(service: tinker.ServiceClient) -> None:
    def negative_log_likelihood(
        data: list[tinker.Datum], logprobs_list: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        loss = -torch.stack([p.sum() for p in logprobs_list]).sum()
        return loss, {"half:sum": loss.item() / 2}

    client = new_model(service)
    data = batch(6)
    plain = client.forward_backward(data, "cross_entropy"), client.optim_step(tinker.AdamParams(learning_rate=0))
    custom = (
        client.forward_backward_custom(data, negative_log_likelihood),
        client.optim_step(tinker.AdamParams(learning_rate=0)),
    )
    loss = plain[0].result().metrics["loss:sum"]
    assert custom[0].result().metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    assert custom[0].result().metrics["half:sum"] == pytest.approx(loss / 2, rel=1e-5)
    norms = [step.result().metrics["grad_norm:mean"] for _, step in (plain, custom)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_gradients_add_up_until_the_step(service: tinker.ServiceClient) -> None:
    one, two = new_model(service), new_model(service)
    data = batch(7)
    one.forward_backward(data, "cross_entropy")
    for datum in data:
        two.forward_backward([datum], "cross_entropy")
    norms = [client.optim_step(ADAM).result().metrics["grad_norm:mean"] for client in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert one.optim_step(ADAM).result().metrics["grad_norm:mean"] == 0.0  # the step has cleared them


@pytest.mark.parametrize(
    "changed",
    [
        {"learning_rate": 2e-3},
        {"beta1": 0.5},
        {"beta2": 0.5},
        {"eps": 1e-2},
        {"weight_decay": 0.5},
        {"grad_clip_norm": 1e-3},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_setting_of_the_optimizer_is_honoured(changed: dict[str, float], service: tinker.ServiceClient) -> None:
    usual = {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-3,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }

    def outcome(params: dict[str, float]) -> np.ndarray:
        client = new_model(service)
        for seed in (8, 9):  # two different gradients, without which the betas would cancel out
            train(client, batch(seed), steps=1, adam=tinker.AdamParams(**params))
        return forward(client, PROMPT)[0]

    first = outcome(usual)
    np.testing.assert_array_equal(outcome(usual), first)
    assert np.abs(outcome({**usual, **changed}) - first).max() > 1e-5


def test_the_loss_falls(service: tinker.ServiceClient) -> None:
    losses = train(new_model(service), batch(10), steps=12, adam=tinker.AdamParams(learning_rate=3e-3))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]
