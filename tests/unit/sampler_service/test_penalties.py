"""Penalties, biases and min_p against the formulas in float64."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from sampler_service.core.penalties import History, Penalized
from sampler_service.core.request import Penalties
from sampler_service.core.sampling import scaled_logprobs
from sampler_service.torch_engine.engine import TorchEngine
from tests.support.models import make_model
from tests.unit.sampler_service.serving import generate, plain_logits, prompt, serving

V = 50
CPU = torch.device("cpu")
ALL = Penalties(0.7, -0.4, 1.3, ((4, 3.0), (9, -100.0)))


def reference(logits: np.ndarray, asked: Penalties, before: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Token by token, as the API references describe it."""
    changed = logits.astype(np.float64)
    for token, bias in asked.logit_bias:
        changed[token] += bias
    for token in {*before, *output}:
        changed[token] = changed[token] / asked.repetition if changed[token] > 0 else changed[token] * asked.repetition
    for token in output:
        changed[token] -= asked.frequency
    for token in set(output):
        changed[token] -= asked.presence
    return changed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("penalties"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[TorchEngine]:
    async with serving(folder) as engine:
        yield engine


def test_logits_are_changed_as_in_float64_step_after_step() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, V, generator=generator) * 3
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0])[:, None]
    asked = {0: ALL, 2: Penalties(repetition=0.5), 3: Penalties(frequency=2.0, presence=1.0)}
    before = {row: [row, 7, 7, 30] for row in asked}
    outputs: dict[int, list[int]] = {0: [5, 5, 7], 2: [], 3: [1]}
    penalized = Penalized.of(
        [
            (row, asked[row], History.of(before[row], outputs[row], vocab_size=V, device=CPU))
            for row in asked
        ],
        device=CPU,
    )  # fmt: skip
    assert penalized is not None
    for step in range(5):
        plain = scaled_logprobs(logits, temperatures)
        changed = penalized.logprobs(logits, plain, temperatures)
        assert changed[1].equal(plain[1])
        for row, penalties in asked.items():
            wanted = reference(logits[row].numpy(), penalties, before[row], outputs[row])
            wanted = torch.from_numpy(wanted / temperatures[row].item()).log_softmax(-1)
            torch.testing.assert_close(changed[row].double(), wanted, atol=2e-5, rtol=1e-5)
        tokens = torch.tensor([5, 1, step, 1])
        penalized.take(tokens)
        for row in asked:
            outputs[row].append(int(tokens[row]))


def test_a_token_that_was_thrown_away_does_not_count() -> None:
    history = History.of([1], [], vocab_size=V, device=CPU)
    penalized = Penalized.of([(0, ALL, history), (2, ALL, history)], device=CPU)
    assert penalized is not None
    penalized.take(torch.tensor([3, 3, 4]), counted_A=torch.tensor([False, True]))
    assert penalized.counts_A_V.sum(-1).tolist() == [0, 1]
    assert penalized.counts_A_V[1, 4] == 1


CASES: dict[str, dict[str, Any]] = {
    "frequency": {"penalties": Penalties(frequency=2.0)},
    "presence": {"penalties": Penalties(presence=2.0)},
    "repetition": {"penalties": Penalties(repetition=1.5)},
    "bias": {"penalties": Penalties(logit_bias=((17, 20.0),))},
    "all": {"penalties": ALL},
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES)
async def test_a_greedy_generation_is_the_formula_and_its_logprobs_are_the_models(
    engine: TorchEngine, folder: Path, case: str
) -> None:
    tokens, count = prompt(20, seed=3), 24
    result = await generate(engine, tokens, temperature=0.0, max_tokens=count, topk_sample_logprobs=2, **CASES[case])
    drawn = list(result.sequences[0].tokens)
    logits = plain_logits(folder, [*tokens.tolist(), *drawn])[len(tokens) - 1 : -1]
    wanted = [
        int(reference(logits[n].numpy(), CASES[case]["penalties"], tokens.tolist(), drawn[:n]).argmax())
        for n in range(count)
    ]
    assert drawn == wanted
    assert drawn != list((await generate(engine, tokens, temperature=0.0, max_tokens=count)).sequences[0].tokens)
    own = logits.log_softmax(-1)
    expected = own.gather(-1, torch.tensor(drawn)[:, None])[:, 0]
    np.testing.assert_allclose(result.sequences[0].logprobs, expected.numpy(), atol=1e-4)
    assert result.sequences[0].topk is not None
    np.testing.assert_allclose(result.sequences[0].topk.logprobs, own.topk(2).values.numpy(), atol=1e-4)


@pytest.mark.asyncio(loop_scope="module")
async def test_penalties_concern_nobody_else_in_the_batch(engine: TorchEngine) -> None:
    tokens = prompt(12, seed=4)
    plain = {"seed": 3, "max_tokens": 30, "num_samples": 2}
    penalized = {**plain, "penalties": ALL, "min_p": 0.01, "temperature": 1.4}
    alone = [await generate(engine, tokens, **plain), await generate(engine, tokens, **penalized)]
    generations = [generate(engine, tokens, **fields) for fields in (plain, penalized, {**plain, "max_tokens": 7})]
    together = await asyncio.gather(*generations)
    for before, now in zip(alone, together, strict=False):
        assert [one.tokens for one in before.sequences] == [one.tokens for one in now.sequences]


@pytest.mark.asyncio(loop_scope="module")
async def test_min_p_of_1_leaves_the_most_probable_token(engine: TorchEngine) -> None:
    tokens = prompt(12, seed=5)
    greedy = await generate(engine, tokens, temperature=0.0, max_tokens=10)
    cut = await generate(engine, tokens, temperature=1.0, min_p=1.0, seed=1, max_tokens=10)
    assert cut.sequences[0].tokens == greedy.sequences[0].tokens
