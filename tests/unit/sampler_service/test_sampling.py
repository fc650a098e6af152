"""Draws against the distribution that they should have."""

import numpy as np
import pytest
import torch

from sampler_service.core.sampling import Rule, Rules, draw, scaled_logprobs, stream_keys, uniforms

V = 12
CPU = torch.device("cpu")
LOGITS = torch.linspace(-2, 2, V)[torch.randperm(V, generator=torch.Generator().manual_seed(0))]


def draws(rule: Rule, count: int, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    rules = Rules.of([rule] * count, vocab_size=logits.shape[0], device=CPU)
    numbers = torch.from_numpy(uniforms(stream_keys(1, 0, count), np.zeros(count, np.uint64)))
    return draw(scaled_logprobs(logits.expand(count, -1).clone(), rules.temperature_R_1), rules, numbers)


def expected(rule: Rule) -> torch.Tensor:
    """Step by step, on sorted probabilities."""
    order = LOGITS.argsort(descending=True)
    p = (LOGITS[order].double() / rule.temperature).softmax(-1)
    p[p < rule.min_p * p[0]] = 0
    if 0 < rule.top_k < V:
        p[rule.top_k :] = 0
    p /= p.sum()
    before = p.cumsum(-1) - p
    p[before >= rule.top_p] = 0
    return torch.zeros(V, dtype=torch.float64).scatter(0, order, p / p.sum())


@pytest.mark.parametrize(
    "rule",
    [
        Rule(1.0, 0, 1.0),
        Rule(0.6, -1, 1.0),
        Rule(2.0, 0, 1.0),
        Rule(1.0, 4, 1.0),
        Rule(1.0, 0, 0.7),
        Rule(0.8, 6, 0.8),
        Rule(1.0, V + 5, 1.0),
        Rule(1.0, 1, 0.5),
        Rule(1.0, 0, 1.0, 0.2),
        Rule(0.7, 5, 0.9, 0.1),
        Rule(1.0, 0, 1.0, 1.0),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(rule: Rule) -> None:
    count = 40_000
    seen = torch.bincount(draws(rule, count), minlength=V).double()
    p = expected(rule)
    assert (seen[p == 0] == 0).all()
    kept = p > 0
    chi_square = ((seen[kept] - count * p[kept]) ** 2 / (count * p[kept])).sum().item()
    assert chi_square < 40  # 11 degrees of freedom at most: far above the 99.99 % quantile, and the seed is fixed


def test_greedy_takes_the_largest_beside_others_that_draw() -> None:
    rules = Rules.of([Rule(0.0, 0, 1.0), Rule(1.0, 1, 1.0), Rule(1.0, 0, 1.0)], vocab_size=V, device=CPU)
    logits = LOGITS.expand(3, -1).clone()
    logprobs = scaled_logprobs(logits, rules.temperature_R_1)
    tokens = draw(logprobs, rules, torch.tensor([0.999999, 0.999999, 0.0], dtype=torch.float64))
    assert tokens[:2].tolist() == [LOGITS.argmax().item()] * 2
    torch.testing.assert_close(logprobs[0], LOGITS.log_softmax(-1))


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(number: float) -> None:
    logits = torch.full((1, V), float("-inf"))
    logits[0, 4] = 1.0
    rules = Rules.of([Rule(1.0, 0, 1.0)], vocab_size=V, device=CPU)
    assert draw(logits.log_softmax(-1), rules, torch.tensor([number], dtype=torch.float64)).tolist() == [4]


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    assert set(draws(Rule(temperature, 0, 1.0), 50).tolist()) == {LOGITS.argmax().item()}


def test_a_cut_row_draws_the_same_beside_rows_with_other_cuts() -> None:
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 0.1
    peaked = flat.clone()
    peaked[:50] += 12
    for rule in (Rule(1.0, 0, 0.9), Rule(1.0, 3000, 0.9), Rule(1.0, 40, 0.9)):
        alone = draws(rule, 200, peaked)
        both = torch.cat([peaked.expand(200, -1), flat.expand(200, -1)])
        rules = Rules.of([rule] * 200 + [Rule(1.0, 0, 0.99)] * 200, vocab_size=5000, device=CPU)
        numbers = torch.from_numpy(uniforms(stream_keys(1, 0, 200), np.zeros(200, np.uint64)))
        mixed = draw(both.log_softmax(-1), rules, torch.cat([numbers, numbers]))
        assert mixed[:200].tolist() == alone.tolist()


def test_streams_are_uniform_and_apart() -> None:
    keys = np.concatenate([stream_keys(seed, stream, 8) for seed in (0, 1, -1, 2**63) for stream in (0, 1)])
    assert len(set(keys.tolist())) == 64
    numbers = uniforms(keys[:, None], np.arange(2000, dtype=np.uint64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    np.testing.assert_allclose(numbers.mean(1), 0.5, atol=0.03)
    assert np.abs(np.corrcoef(numbers) - np.eye(64)).max() < 0.12
