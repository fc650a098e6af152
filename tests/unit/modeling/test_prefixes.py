"""Sequences with common beginnings: where their tokens lie, and attention to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.modeling.attention import Packed
from tinsmith.modeling.heads import Heads
from tinsmith.modeling.prefixes import _DEEPEST, Forest, forest_of

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=9)


def paths(forest: Forest) -> list[list[int]]:
    """The rows that each segment's last row sees."""
    layout = Packed(forest.lengths, forest.below)
    return [[row for part in (*before, own) for row in range(part.start, part.stop)] for own, before in layout.paths()]


@given(st.lists(SEQUENCES, min_size=1, max_size=3), st.integers(1, 4))
def test_each_sequence_is_a_path_of_the_forest(groups: list[list[list[int]]], least: int) -> None:
    arrays = [[np.array(one, np.int32) for one in group] for group in groups]
    flat = [one for group in arrays for one in group]
    forest = forest_of(arrays, least_saved=least)
    if forest is None:
        return
    tokens_N = np.concatenate(flat)
    tokens_T = tokens_N[forest.sources_T]
    assert sum(forest.lengths) == len(tokens_T) < len(tokens_N)
    seen = {path[-1]: path for path in paths(forest)}
    starts = [0, *accumulate(map(len, flat))]
    for one, start in zip(flat, starts, strict=False):
        rows = forest.rows_N[start : start + len(one)].tolist()
        assert tokens_T[rows].tolist() == one.tolist()
        last = min(row for row in seen if row >= rows[-1] and rows[-1] in seen[row])
        assert seen[last][: len(rows)] == rows
    borders = [0, *accumulate(sum(map(len, group)) for group in arrays)]
    owners = [set(forest.rows_N[begin:end].tolist()) for begin, end in pairwise(borders)]
    assert all(max(one) < min(two) for one, two in pairwise(owners)), "groups lie in their order"


@given(SEQUENCES)
def test_every_common_token_lies_once_when_any_length_is_shared(sequences: list[list[int]]) -> None:
    forest = forest_of([[np.array(one) for one in sequences]], least_saved=1)
    beginnings = {tuple(one[: n + 1]) for one in sequences for n in range(len(one))}
    assert len(beginnings) == (sum(map(len, sequences)) if forest is None else sum(forest.lengths))


def test_a_beginning_that_saves_too_little_is_not_shared() -> None:
    sequences = [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])]
    assert forest_of([sequences], least_saved=4) is None
    found = forest_of([sequences], least_saved=3)
    assert found is not None
    assert found.lengths == [3, 1, 1]
    assert found.below == [2, 0, 0]


def test_many_sequences_may_share_a_short_beginning_and_two_of_them_a_longer_one() -> None:
    sequences = [np.array(one) for one in ([1, 2, 3], [1, 3, 3, 3, 3, 3, 4], [1, 3, 3, 3, 3, 3, 5], [1, 3, 4])]
    found = forest_of([sequences], least_saved=3)
    assert found is not None
    assert sorted(zip(found.lengths, found.below, strict=True)) == [(1, 0), (1, 0), (1, 11), (2, 0), (2, 0), (5, 2)]


def test_groups_share_nothing() -> None:
    one = np.arange(5)
    assert forest_of([[one], [one]], least_saved=1) is None


def test_a_chain_may_be_longer_than_pythons_stack() -> None:
    tokens = np.arange(5 * _DEEPEST)
    sequences = [tokens[:n] for n in range(1, len(tokens))]
    found = forest_of([sequences], least_saved=1)
    assert found is not None
    tokens_N = np.concatenate(sequences)
    assert (tokens_N[found.sources_T][found.rows_N] == tokens_N).all()


def apart(
    layout: Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Heads
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attention of the sequence that ends with each segment, by itself; and the rows of the sequence."""
    outputs, rows = [], []
    for own, before in layout.paths():
        path = torch.cat([torch.arange(part.start, part.stop) for part in (*before, own)])
        outputs.append(Packed([len(path)]).attend(0, q[path], k[path], v[path], heads)[-(own.stop - own.start) :])
        rows.append(path)
    return torch.cat(outputs), rows


_TOLERANCE = {"float64": 1e-12, "bfloat16": 8e-3}
FORESTS: Sequence[tuple[list[int], list[int]]] = [
    ([6, 4, 4], [8, 0, 0]),
    ([4, 4], [4, 0]),
    ([5, 3, 2, 2, 7, 3, 1, 1], [14, 4, 0, 0, 0, 2, 0, 0]),
]


@pytest.mark.parametrize("forest", FORESTS, ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["plain", "float64", "bfloat16", "softcap", "sinks"])
def test_attention_to_shared_rows_is_that_of_each_sequence(
    forest: tuple[list[int], list[int]], window: int | None, kind: str
) -> None:
    dtype = getattr(torch, kind) if kind in _TOLERANCE else torch.float32
    generator = torch.Generator().manual_seed(0)
    layout = Packed(*forest)
    q, k, v = (
        torch.randn(sum(forest[0]), heads, 16, generator=generator, dtype=dtype).requires_grad_() for heads in (4, 2, 2)
    )
    heads = Heads(
        scale=0.3,
        window=window,
        softcap=2.0 if kind == "softcap" else None,
        sinks_N=torch.ones(4) if kind == "sinks" else None,
    )
    ours = layout.attend(0, q, k, v, heads)
    theirs, _ = apart(layout, q, k, v, heads)
    tolerance = _TOLERANCE.get(kind, 2e-6)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    grad = torch.randn(ours.shape, generator=generator, dtype=dtype)
    for mine, other in zip(
        torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(theirs, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=10 * tolerance, atol=10 * tolerance)
    with torch.no_grad():
        torch.testing.assert_close(layout.attend(0, q, k, v, heads), theirs, rtol=tolerance, atol=tolerance)
