"""The loop over runs: layers that read one input, against each layer and run alone through autograd."""

import pytest
import torch
from torch import Tensor, nn

from tinsmith.modeling.adapter import Adapter, AdapterConfig, Target
from tinsmith.modeling.adapter_runs import ActiveRuns, PassGradient, Run
from tinsmith.modeling.lora import LoraLinear, backward, forward, parameters_of

T, INPUTS, OUTPUTS = 80, 60, {"a": 40, "b": 90, "c": 20}
"""So that an adapter is merged from 49, 73 and 31 rows on."""
ROWS = {
    "all": [slice(0, T)],
    "with gaps": [slice(3, 20), slice(25, 38)],
    "out of order": [slice(70, 80), slice(0, 66)],
    "by number": [torch.tensor([5, 1, 30]), slice(8, 20)],
}


def adapter(seed: int, *, names: str = "abc", rank: int = 3, dtype: torch.dtype = torch.float64) -> Adapter:
    config = AdapterConfig(rank=rank, seed=seed, train_attn=False, train_unembed=False)
    made = Adapter.create(config, [Target(name, "mlp", INPUTS, OUTPUTS[name]) for name in names], torch.device("cpu"))
    made = made.like(torch.randn(made.flat.shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    for tensor in made.tensors():
        tensor.requires_grad_()
    return made


@pytest.fixture(params=ROWS)
def runs(request: pytest.FixtureRequest) -> list[Run]:
    """Runs of an adapter of rank 3 with all layers, and of one of rank 2 without one of them."""
    adapters = [adapter(0), adapter(1, names="ac", rank=2)]
    return [Run(one, rows) for one, rows in zip(adapters, ROWS[request.param], strict=False)]


def layers_of(runs: list[Run], *, dtype: torch.dtype = torch.float64) -> list[LoraLinear]:
    torch.manual_seed(0)
    active = ActiveRuns(runs)
    return [
        LoraLinear(nn.Linear(INPUTS, out, bias=name == "b", dtype=dtype).requires_grad_(False), name, active)
        for name, out in OUTPUTS.items()
    ]


def plain(x: Tensor, layer: LoraLinear, runs: list[Run]) -> Tensor:
    y = torch.nn.functional.linear(x, layer.weight, layer.bias)
    for run in runs:
        mine = run.adapter.weights.get(layer.name)
        if mine is not None:
            here = torch.zeros_like(y)
            here[run.rows] = run.adapter.scaling * (x[run.rows] @ mine.a_R_I.T) @ mine.b_O_R.T
            y = y + here
    return y


def parameters(runs: list[Run]) -> list[Tensor]:
    return [tensor for run in runs for tensor in run.adapter.tensors()]


@pytest.mark.parametrize("frozen_input", [False, True])
def test_a_layer_equals_plain_autograd_gradients_included(runs: list[Run], frozen_input: bool) -> None:
    x = torch.randn(T, INPUTS, dtype=torch.float64, requires_grad=not frozen_input)
    inputs = parameters(runs) if frozen_input else [x, *parameters(runs)]
    layers = layers_of(runs)
    ours, theirs = [layer(x) for layer in layers], [plain(x, layer, runs) for layer in layers]
    factors = [torch.randn_like(y) for y in ours]
    found, expected = (torch.autograd.grad(ys, inputs, factors) for ys in (ours, theirs))
    for mine, other in zip([*ours, *found], [*theirs, *expected], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_layers_that_read_one_input_equal_each_alone(runs: list[Run]) -> None:
    x, layers = torch.randn(T, INPUTS, dtype=torch.float64), layers_of(runs)
    y, lows = forward(x, layers, runs)
    grad = torch.randn_like(y)
    grad_x, grads = backward(x, layers, runs, lows, grad, need_x=True)
    assert len(grads) == len(parameters_of(layers, runs))
    grads_x, rest = [], list(grads)
    for layer, y_O, grad_O in zip(layers, *(one.split(list(OUTPUTS.values()), 1) for one in (y, grad)), strict=True):
        alone, lows = forward(x, [layer], runs)
        torch.testing.assert_close(y_O, alone, rtol=1e-12, atol=1e-12)
        grad_alone, expected = backward(x, [layer], runs, lows, grad_O, need_x=True)
        grads_x.append(grad_alone)
        for one in expected:
            torch.testing.assert_close(rest.pop(0), one, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad_x, sum(grads_x), rtol=1e-12, atol=1e-12)
    assert backward(x, layers, runs, forward(x, layers, runs)[1], grad, need_x=False)[0] is None


@torch.no_grad()
def test_a_pass_without_gradient_computes_what_one_with_gradient_does(runs: list[Run]) -> None:
    x = torch.randn(T, INPUTS, dtype=torch.float64)
    for layer in layers_of(runs):
        torch.testing.assert_close(layer(x), forward(x, [layer], runs)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [13, 80])
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_are_added_to_the_buffer_of_the_pass(count: int, rows: int, dtype: torch.dtype) -> None:
    adapters = [adapter(n, dtype=torch.float32) for n in range(count)]
    x = torch.randn(rows * count, INPUTS).to(dtype)

    def loss(written: list[PassGradient] | None) -> Tensor:
        runs = [
            Run(one, slice(rows * n, rows * n + rows), written[n] if written else None)
            for n, one in enumerate(adapters)
        ]
        a, b, _ = layers_of(runs, dtype=dtype)  # "c" is not called, "b" twice
        return sum(y.float().square().sum() for y in (a(x), b(x), b(2 * x)))  # type: ignore[return-value]

    ours = [PassGradient(one) for one in adapters]
    inputs = [tensor for one in adapters for tensor in one.tensors()]
    expected = torch.autograd.grad(loss(None), inputs, materialize_grads=True)
    anchors = [one.anchor for one in ours]
    left = torch.autograd.grad(loss(ours), [*anchors, *inputs], allow_unused=True)
    assert left == (None,) * (7 * count)
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    for n, one in enumerate(ours):
        wanted = list(expected[6 * n : 6 * n + 6])
        assert _gap(one.gather([None] * 6), wanted) <= tolerance
        more = one.gather([None, torch.ones_like(inputs[6 * n + 1]), *[None] * 4])  # what autograd has for one of them
        wanted[1] = wanted[1] + 1
        assert _gap(more, wanted) <= tolerance


def test_an_adapter_that_is_rounded_once_computes_the_same() -> None:
    one, x = adapter(0, dtype=torch.float32), torch.randn(20, INPUTS).to(torch.bfloat16)
    by_layer = Run(one, slice(0, 20))
    at_once = by_layer.rounded_for(torch.bfloat16)
    assert at_once.rounded is not None
    assert by_layer.rounded_for(torch.float32) is by_layer
    results = []
    for run in (by_layer, at_once):
        outputs = [layer(x) for layer in layers_of([run], dtype=torch.bfloat16)]
        total = torch.stack([y.float().square().sum() for y in outputs]).sum()
        results.append([*outputs, *torch.autograd.grad(total, one.tensors())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def _gap(ours: Tensor, theirs: list[Tensor]) -> float:
    expected = torch.cat([grad.flatten() for grad in theirs])
    return float((ours - expected).norm() / expected.norm())


def test_an_adapter_is_merged_where_it_has_many_rows_and_full_precision() -> None:
    def num_merged(num_rows: int, *, dtype: torch.dtype = torch.float32, own: torch.dtype = torch.float32) -> int:
        runs = [Run(adapter(0, dtype=own), slice(0, num_rows))]
        layers = layers_of(runs, dtype=dtype)
        return len(layers) - len(forward(torch.ones(num_rows, INPUTS, dtype=dtype), layers, runs)[1])

    with torch.no_grad():
        assert [num_merged(n) for n in (30, 31, 48, 49, 72, 73)] == [0, 1, 1, 2, 2, 3]
        assert num_merged(1000, dtype=torch.bfloat16) == 0
        assert num_merged(1000, dtype=torch.bfloat16, own=torch.bfloat16) == 0
