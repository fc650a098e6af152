"""A base model in bfloat16 with adapters in float32, as it runs on a GPU, against the float32 oracle."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.adapters import random_adapter
from tests.support.models import VOCAB_SIZE
from tests.support.oracle import Oracle
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.grouped_lora import torch_grouped_mm
from tinsmith.modeling.kernels.choice import Kernels
from tinsmith.modeling.logprobs import target_logprobs

CPU = torch.device("cpu")
LENGTHS = [9, 30, 30, 41]
BORDER = 39
NUM_TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def half(model_folder: Path) -> BaseModel:
    return BaseModel.load(model_folder, device=CPU, dtype=torch.bfloat16)


def tenants(base: BaseModel) -> list[Run]:
    """Two, of different ranks, with B that is not zero."""
    adapters = [random_adapter(base.targets, seed=rank, rank=rank, b_std=0.02) for rank in (8, 3)]
    return [Run(adapters[0], slice(0, BORDER)), Run(adapters[1], slice(BORDER, NUM_TOKENS))]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets, and weights of which some are zero."""
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator) for _ in range(2))
    weights = torch.randn(NUM_TOKENS, generator=generator)
    weights[10:20] = 0
    return tokens, targets, weights


def logprobs_and_gradients(base: BaseModel, runs: list[Run]) -> tuple[Tensor, list[Tensor]]:
    tokens, targets, weights = inputs()
    hidden = base.hidden_states(tokens, positions_of(LENGTHS, CPU), Packed(LENGTHS), runs)
    ours = target_logprobs(base.head, hidden, torch.arange(NUM_TOKENS), targets, runs)
    parameters = [tensor for run in runs for tensor in run.adapter.tensors()]
    return ours.detach(), list(torch.autograd.grad((ours * weights).sum(), parameters))


@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_in_bfloat16_point_where_those_of_the_float32_oracle_do(
    half: BaseModel, model_folder: Path, tmp_path: Path, grouped: bool
) -> None:
    tokens, targets, weights = inputs()
    runs = tenants(half)
    base = replace(half, kernels=Kernels(grouped_mm=torch_grouped_mm)) if grouped else half
    ours, grads = logprobs_and_gradients(base, runs)
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert {run.adapter.flat.dtype for run in runs} == {torch.float32}
    found = iter(grads)
    for run, pieces in zip(runs, ([slice(0, 9), slice(9, 39)], [slice(39, 69), slice(69, 110)]), strict=True):
        oracle = Oracle(model_folder, run.adapter, tmp_path / str(run.adapter.config.rank))

        def theirs(oracle: Oracle = oracle, pieces: list[slice] = pieces) -> Tensor:
            return torch.cat([oracle.logprobs(tokens[p].tolist(), targets[p]) for p in pieces])

        rows = run.rows
        assert isinstance(rows, slice)
        gap = (ours[rows] - theirs().detach()).abs()
        assert gap.mean() < 0.02
        assert gap.max() < 0.1
        for expected in oracle.gradients(lambda rows=rows, theirs=theirs: (theirs() * weights[rows]).sum()):
            grad = next(found)
            assert torch.cosine_similarity(grad.ravel(), expected.ravel(), dim=0) > 0.99
            assert 0.97 < grad.norm() / expected.norm() < 1.03
