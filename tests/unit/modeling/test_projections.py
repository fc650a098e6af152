"""Layers that read one input, computed together, against each alone through autograd; and who is taken together."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tinsmith.modeling import projections
from tinsmith.modeling.adapter import Adapter, AdapterConfig, LoraWeights, Target
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.lora import ActiveRuns, LoraLinear, Run, join_readers, listening, shares_of
from tinsmith.modeling.merging import worth_merging
from tinsmith.modeling.pass_gradient import PassGradient
from tinsmith.modeling.projections import Frozen, Layers, project
from tinsmith.modeling.shares import Share, blocks

T, INPUTS, OUTPUTS = 40, 6, (4, 9, 2)
ROWS = {
    "all": [slice(0, T)],
    "with gaps": [slice(3, 20), slice(25, 38)],
    "out of order": [slice(30, 40), slice(0, 12)],
    "by number": [torch.tensor([5, 1, 30]), slice(8, 20)],
}
ALIKE = [slice(1, 14), slice(14, 27), slice(27, 40)]
"""Rows of shares that are computed as one batch, when they are of one rank too."""


@pytest.fixture(params=ROWS)
def shares(request: pytest.FixtureRequest) -> list[Share]:
    """Shares of rank 3 with all layers, and of rank 2 without one of them."""
    torch.manual_seed(0)
    return [
        Share(
            rows,
            scaling=2.0 + n,
            weights=[
                None if (n, layer) == (1, 1) else weights(rank=3 - n, out=out) for layer, out in enumerate(OUTPUTS)
            ],
        )
        for n, rows in enumerate(ROWS[request.param])
    ]


@pytest.fixture
def alike() -> list[Share]:
    torch.manual_seed(0)
    return [
        Share(rows, 2.0, [None if out == 9 else weights(rank=3, out=out) for out in OUTPUTS], names="abc")
        for rows in ALIKE
    ]


def weights(rank: int, out: int) -> LoraWeights:
    a, b = torch.randn(rank, INPUTS, dtype=torch.float64), torch.randn(out, rank, dtype=torch.float64)
    return LoraWeights(a.requires_grad_(), b.requires_grad_())


def plain(x: Tensor, layers: list[Frozen], shares: list[Share]) -> list[Tensor]:
    outputs = []
    for n, layer in enumerate(layers):
        y = torch.nn.functional.linear(x, layer.weight_O_I, layer.bias_O)
        for share in shares:
            mine = share.weights[n]
            if mine is not None:
                here = torch.zeros_like(y)
                here[share.rows] = share.scaling * (x[share.rows] @ mine.a_R_I.T) @ mine.b_O_R.T
                y = y + here
        outputs.append(y)
    return outputs


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("frozen_input", [False, True])
def test_layers_together_equal_each_alone_gradients_included(
    shares: list[Share], merged: bool, frozen_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if merged:
        monkeypatch.setattr(projections, "worth_merging", lambda x, share, *_: isinstance(share.rows, slice))
    check(shares, frozen_input=frozen_input)


@pytest.mark.parametrize("merged", [False, True])
def test_shares_that_are_alike_are_one_batch(alike: list[Share], merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "worth_merging", lambda *_: merged)
    x = torch.zeros(T, INPUTS, dtype=torch.float64)
    assert [block.shares for block in blocks(alike, x)] == [alike]  # type: ignore[union-attr]
    check(alike, frozen_input=False)
    other = [alike[0], replace(alike[1], scaling=3.0), alike[2]]
    assert len(list(blocks(other, x))) == 3


def check(shares: list[Share], *, frozen_input: bool) -> None:
    x = torch.randn(T, INPUTS, dtype=torch.float64, requires_grad=not frozen_input)
    layers = [
        Frozen(
            torch.randn(out, INPUTS, dtype=torch.float64), torch.randn(out, dtype=torch.float64) if out == 9 else None
        )
        for out in OUTPUTS
    ]
    parameters = [t for share in shares for w in share.weights if w is not None for t in (w.a_R_I, w.b_O_R)]
    inputs = parameters if frozen_input else [x, *parameters]
    ours, theirs = project(x, Layers(layers), shares), plain(x, layers, shares)
    factors = [torch.randn_like(y) for y in ours]
    found, expected = (torch.autograd.grad(ys, inputs, factors) for ys in (ours, theirs))
    for mine, other in zip([*ours, *found], [*theirs, *expected], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [13, 80])
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_are_added_to_the_buffer_of_the_pass(count: int, rows: int) -> None:
    torch.manual_seed(0)
    targets = [Target(name, "mlp", INPUTS, out) for name, out in zip("abc", OUTPUTS, strict=True)]
    adapters = [
        Adapter.create(
            AdapterConfig(rank=3, seed=n, train_attn=False, train_unembed=False), targets, torch.device("cpu")
        )
        for n in range(count)
    ]
    for adapter in adapters:
        for tensor in adapter.tensors():
            tensor.normal_().requires_grad_()
    x = torch.randn(rows * count, INPUTS)
    frozen = [Frozen(torch.randn(out, INPUTS)) for out in OUTPUTS[:2]]  # "c" is not called, "b" twice

    def loss(written: list[PassGradient] | None) -> Tensor:
        runs = [
            Run(adapter, slice(rows * n, rows * n + rows), written[n] if written else None)
            for n, adapter in enumerate(adapters)
        ]
        both, again = project(x, Layers(frozen), shares_of(runs, "ab")), shares_of(runs, "b")
        outputs = [*both, *project(2 * x, Layers(frozen[1:]), again)]
        return torch.cat([y.square().sum()[None] for y in outputs]).sum()

    ours = [PassGradient(adapter) for adapter in adapters]
    inputs = [tensor for adapter in adapters for tensor in adapter.tensors()]
    expected = torch.autograd.grad(loss(None), inputs, materialize_grads=True)
    anchors = [one.anchor for one in ours]
    left = torch.autograd.grad(loss(ours), [*anchors, *inputs], allow_unused=True)
    assert left == (None,) * (7 * count)
    for n, one in enumerate(ours):
        wanted = list(expected[6 * n : 6 * n + 6])
        torch.testing.assert_close(one.gather([None] * 6), torch.cat([grad.flatten() for grad in wanted]))
        more = one.gather([None, torch.ones_like(inputs[6 * n + 1]), *[None] * 4])  # what autograd has for one of them
        wanted[1] = wanted[1] + 1
        torch.testing.assert_close(more, torch.cat([grad.flatten() for grad in wanted]))


@pytest.mark.parametrize("merged", [False, True])
@torch.no_grad()
def test_layers_whose_matrices_lie_end_to_end_are_one_product(
    shares: list[Share], merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if merged:
        monkeypatch.setattr(projections, "worth_merging", lambda x, share, *_: isinstance(share.rows, slice))
    torch.manual_seed(1)
    x = torch.randn(T, INPUTS, dtype=torch.float64)
    matrix, bias = torch.randn(INPUTS, sum(OUTPUTS), dtype=torch.float64).T, torch.randn(15, dtype=torch.float64)
    frozen = [Frozen(w, b) for w, b in zip(matrix.split(OUTPUTS), bias.split(OUTPUTS), strict=True)]
    whole, apart = Layers(frozen, Frozen(matrix, bias)), Layers(frozen)
    assert whole.whole is not None
    assert apart.whole is None
    assert Layers([Frozen(w.clone()) for w in matrix.split(OUTPUTS)], Frozen(matrix)).whole is None
    found = []
    for layers in (whole, apart):
        y, lows = projections.forward(x, layers, shares)
        grad_x, grads = projections.backward(x, layers, shares, lows, y.square(), need_x=True)
        found.append([y, grad_x, *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_share_is_merged_where_it_has_many_rows_and_full_precision() -> None:
    def worth(num_rows: int, dtype: torch.dtype = torch.float32, adapter: torch.dtype = torch.float32) -> bool:
        mine = LoraWeights(torch.ones(2, 8, dtype=adapter), torch.ones(24, 2, dtype=adapter))
        share = Share(slice(0, num_rows), 1.0, [mine])
        x = torch.ones(num_rows, 8, dtype=dtype)
        return worth_merging(x, share, [x.new_empty(num_rows, 24)])

    assert worth(13)
    assert not worth(12)  # 2 * 8 * 24 / (8 + 24) rows cost the same
    assert not worth(1000, dtype=torch.bfloat16)
    assert not worth(1000, dtype=torch.bfloat16, adapter=torch.bfloat16)


def readers(base: BaseModel) -> set[tuple[str, ...]]:
    layers = [module for module in base.decoder.modules() if isinstance(module, LoraLinear)]
    return {tuple(one.name.rsplit(".", 1)[-1] for one in layer.readers) for layer in layers}


def test_layers_that_read_one_tensor_find_each_other_when_a_model_is_loaded(base: BaseModel) -> None:
    assert readers(base) == {("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)}


class Two(nn.Module):
    def __init__(self, active: ActiveRuns) -> None:
        super().__init__()
        self.a, self.b = (LoraLinear(nn.Linear(4, 4).requires_grad_(False), name, active) for name in "ab")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + self.b(y)


def test_an_input_that_is_not_the_same_is_computed_by_itself() -> None:
    torch.manual_seed(0)
    active = ActiveRuns()
    model = Two(active)
    adapter = Adapter.create(
        AdapterConfig(rank=2, train_attn=False, train_unembed=False, seed=0),
        [Target(name, "mlp", 4, 4) for name in "ab"],
        torch.device("cpu"),
    )
    for mine in adapter.weights.values():
        mine.b_O_R.normal_()
    x, other = torch.randn(3, 4), torch.randn(3, 4)
    with listening(active) as calls:
        model(x, x)
    active.runs = [Run(adapter, slice(0, 3))]
    same, different = model(x, x), model(x, other)
    alone_b = model.b(x)
    join_readers(model, calls)
    assert model.a.readers == model.b.readers == (model.a, model.b)
    torch.testing.assert_close(model(x, x), same)
    assert active.waiting is None
    torch.testing.assert_close(model(x, other), different)
    model.a(x)
    x.add_(1)  # now it is another input
    assert not torch.equal(model.b(x), alone_b)
    x = x.clone()
    model.a(x)
    with torch.no_grad():
        assert not model.b(x).requires_grad
