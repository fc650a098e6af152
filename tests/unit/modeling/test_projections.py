"""Layers that read one input, computed together, against each alone through autograd; and who is taken together."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tinsmith.modeling import projections
from tinsmith.modeling.adapter import Adapter, AdapterConfig, LoraWeights, Target
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.lora import ActiveRuns, LoraLinear, Run, join_readers, listening, shares_of
from tinsmith.modeling.pass_gradient import PassGradient
from tinsmith.modeling.projections import Frozen, Share, project

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
    """Of ranks 3 and 2; the first has all layers, the second lacks one."""
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
        monkeypatch.setattr(projections, "_worth_merging", lambda x, share, *_: isinstance(share.rows, slice))
    check(shares, frozen_input=frozen_input)


@pytest.mark.parametrize("merged", [False, True])
def test_shares_that_are_alike_are_one_batch(alike: list[Share], merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "_worth_merging", lambda *_: merged)
    assert [len(block.shares) for block in projections._blocks(alike, T)] == [3]
    check(alike, frozen_input=False)
    other = [alike[0], replace(alike[1], scaling=3.0), alike[2]]
    assert [len(block.shares) for block in projections._blocks(other, T)] == [1, 1, 1]


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
    ours, theirs = project(x, layers, shares), plain(x, layers, shares)
    factors = [torch.randn_like(y) for y in ours]
    found, expected = (torch.autograd.grad(ys, inputs, factors) for ys in (ours, theirs))
    for mine, other in zip([*ours, *found], [*theirs, *expected], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3])
def test_gradients_are_written_to_the_buffer_of_the_pass_once(count: int) -> None:
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
    x = torch.randn(13 * count, INPUTS)
    layers = [Frozen(torch.randn(out, INPUTS)) for out in OUTPUTS[:2]]  # "c" is not called

    def gradients(written: list[PassGradient] | None) -> list[Tensor]:
        runs = [
            Run(adapter, slice(13 * n, 13 * n + 13), written[n] if written else None)
            for n, adapter in enumerate(adapters)
        ]
        outputs = [*project(x, layers, shares_of(runs, "ab")), *project(2 * x, layers[1:], shares_of(runs, "b"))]
        loss = torch.cat([y.square().sum()[None] for y in outputs]).sum()
        inputs = [tensor for adapter in adapters for tensor in adapter.tensors()]
        return list(torch.autograd.grad(loss, inputs, materialize_grads=True))

    ours = [PassGradient(adapter) for adapter in adapters]
    found, expected = gradients(ours), gradients(None)
    for n, one in enumerate(ours):
        flat = one.gather(found[6 * n : 6 * n + 6])
        assert found[6 * n].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        torch.testing.assert_close(flat, torch.cat([grad.flatten() for grad in expected[6 * n : 6 * n + 6]]))


def test_a_share_is_merged_where_it_has_many_rows_and_full_precision() -> None:
    def worth(num_rows: int, dtype: torch.dtype = torch.float32, adapter: torch.dtype = torch.float32) -> bool:
        mine = LoraWeights(torch.ones(2, 8, dtype=adapter), torch.ones(24, 2, dtype=adapter))
        share = Share(slice(0, num_rows), 1.0, [mine])
        layer = Frozen(torch.ones(24, 8, dtype=dtype))
        return projections._worth_merging(torch.ones(num_rows, 8, dtype=dtype), share, [layer])

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
