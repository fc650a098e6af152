"""Rows of several slots and of none, against one row after the other."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sampler_service.vllm.kernels import SlotKernels

SLOTS, RANK, IN, OUT = 3, 8, 5, 7


def installed(ranks: dict[int, int] | None = None) -> SimpleNamespace:
    kernels, module = SlotKernels(), SimpleNamespace()
    kernels.ranks.update(ranks or {})
    kernels.install(module)
    return module


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("slots", [[0, 2, -1, 0, 1], [-1] * 5, [1] * 5])
def test_each_row_has_its_own_slot_and_a_row_without_one_has_none(slots: list[int]) -> None:
    slots_n, x, a, b = torch.tensor(slots), random(5, IN, seed=0), random(SLOTS, 1, RANK, IN, seed=1), None
    module = installed()
    low = torch.full((5, RANK), 9.0)
    module.bgmv_shrink(x, a, low, slots_n, 0.5)
    expected = torch.stack([x[n] @ a[s, 0].T * 0.5 if s >= 0 else torch.zeros(RANK) for n, s in enumerate(slots)])
    torch.testing.assert_close(low, expected)
    b = random(SLOTS, 1, OUT, RANK, seed=2)
    start = random(5, OUT + 4, seed=3)
    for add in (True, False):
        y = start.clone()
        module.bgmv_expand_slice(low, b, y, slots_n, 2, OUT, add)
        products = torch.stack([low[n] @ b[s, 0].T if s >= 0 else torch.zeros(OUT) for n, s in enumerate(slots)])
        wanted = start.clone()
        wanted[:, 2 : 2 + OUT] = products + (start[:, 2 : 2 + OUT] if add else 0)
        torch.testing.assert_close(y, wanted)


def test_runs_of_rows_are_told_by_their_lengths() -> None:
    x, a = random(6, IN, seed=0), random(SLOTS, 1, RANK, IN, seed=1)
    module = installed()
    by_row, by_run = torch.empty(6, RANK), torch.empty(6, RANK)
    module.bgmv_shrink(x, a, by_row, torch.tensor([2, 2, -1, 0, 0, 0]), 1.0)
    module.sgmv_shrink(x, a, by_run, None, torch.tensor([2, 1, 3]), torch.tensor([2, -1, 0]), 3, 3, 6, 1.0)
    assert torch.equal(by_row, by_run)


def test_a_slot_is_computed_to_the_rank_of_what_lies_in_it() -> None:
    a, b = random(SLOTS, 1, RANK, IN, seed=1), random(SLOTS, 1, OUT, RANK, seed=2)
    x, slots = random(4, IN, seed=0), torch.tensor([1, 1, 0, 1])
    module = installed({1: 3})
    low, y = torch.empty(4, RANK), torch.zeros(4, OUT)
    module.bgmv_shrink(x, a, low, slots, 1.0)
    assert not low[0, 3:].any()
    assert low[2, 3:].all()
    module.bgmv_expand(low, b, y, slots)
    torch.testing.assert_close(y[0], x[0] @ a[1, 0, :3].T @ b[1, 0, :, :3].T)


def test_rows_without_known_slots_are_an_error() -> None:
    with pytest.raises(ValueError, match="4 rows, and adapters of 1"):
        installed().bgmv_shrink(
            random(4, IN, seed=0), random(SLOTS, 1, RANK, IN, seed=1), torch.empty(4, RANK), torch.tensor([0])
        )
