"""The LoRA product, y = x W^T + b + scaling (x A^T) B^T, with many adapters in one packed batch.

A `Run` (adapter_runs.py) names the rows of the batch to which an adapter applies. `LoraLinear` is the frozen layer that
computes the product. There are two implementations with the same result:

- `forward` and `backward` loop over the runs. They work on every device and in every dtype, for all ranks and for any
  rows. Decoder layers that are differentiated by hand (whole_layers.py) call them directly.
- `Groups` (grouped_lora.py) computes all adapters with grouped matrix products. A base model uses it where
  kernels/choice.py finds a grouped product.

Shapes: T packed tokens, n rows of one run, I input features, O output features, S outputs of several layers side by
side, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.modeling.adapter import LoraWeights
from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.kernels.prepacked import Prepacked
from tinsmith.modeling.quantized import dtype_of, quantized_parameters, take_quantized

_FEW_ROWS = 64
"""Up to this number of rows the gradient of B is computed by one operation. With more rows, two operations are
faster."""


class LoraLinear(nn.Module):
    """A frozen linear layer. Each active adapter's share is added to the adapter's rows."""

    def __init__(self, base: nn.Linear, name: str, active: ActiveRuns, *, by_columns: bool = True) -> None:
        """`by_columns`: a weight in host memory is copied, so that it lies column by column. On a CPU, a product with
        about 8 rows (a small decode step) then takes a third of the time, and a product with many rows takes as long as
        before."""
        super().__init__()
        self.quantized: Callable[[], Tensor] | None = None
        """Computes the weight if it is quantised (quantized.py). None if it is not; the layer then has `weight`."""
        if (parameter := quantized_parameters(base).get("weight")) is not None:
            take_quantized(self, base)
            object.__setattr__(self, "quantized", parameter)  # `parametrizations` registers it
        else:
            if by_columns and base.weight.device.type == "cpu":
                base.weight.data = base.weight.data.T.contiguous().T
            self.weight = base.weight
        self.dtype = base.weight.dtype if parameter is None else dtype_of(parameter)
        self.bias = base.bias
        self.name = name
        self.active = active
        self.num_outputs, num_inputs = base.out_features, base.in_features
        self.merges_above = 2 * num_inputs * self.num_outputs // (num_inputs + self.num_outputs)
        """Largest number of rows of a run for which merging does not pay (see `_shares`)."""
        self.joined: tuple[LoraLinear, ...] = (self,)
        """This layer and the layers that share one product with it in passes without gradient, in order
        (generation.py)."""
        self.prepacked: Prepacked | None = None
        """Prepacked matrices of all joined layers. Only the first joined layer has it."""

    def dense(self) -> Tensor:
        """The weight [O, I]. A quantised weight is dequantised at each call, and callers must not keep it."""
        return self.weight if self.quantized is None else self.quantized()

    def forward(self, x: Tensor) -> Tensor:
        active = self.active
        if active.groups is not None:
            y = active.groups.linear(x.flatten(0, -2), self)
            if y is not None:
                return y.unflatten(0, x.shape[:-1])
        if not torch.is_grad_enabled():
            return self._without_gradient(x)
        parameters = parameters_of([self], active.runs)
        if not parameters and self.quantized is None:
            return nn.functional.linear(x, self.weight, self.bias)
        x_T_I, runs = x.reshape(-1, x.shape[-1]), active.runs
        if active.every_row:
            runs = [replace(run, rows=slice(0, x_T_I.shape[0])) for run in runs]
        y_T_O = _Linear.apply(x_T_I, self, runs, *parameters)
        return y_T_O.unflatten(0, x.shape[:-1])

    def _without_gradient(self, x: Tensor) -> Tensor:
        """The output in a pass without gradients, in as few operations as possible, because their fixed costs are most
        of the time of a decode step of one token."""
        prepacked = self.prepacked if len(self.joined) == 1 else None
        if prepacked is not None and prepacked.gains(x) and prepacked.copies(self.weight):
            y = prepacked.together(x)
        else:
            y = nn.functional.linear(x, self.dense(), self.bias)
        for run in self.active.runs:
            weights = run.weights(self.name)
            if weights is not None:
                rows = slice(None) if self.active.every_row else run.rows
                low_n_R = x.reshape(-1, x.shape[-1])[rows] @ weights.a_R_I.to(x.dtype).T
                add_rows(y.view(-1, y.shape[-1]), rows, low_n_R, weights.b_O_R.to(x.dtype).T, run.adapter.scaling)
        return y


@torch.no_grad()
def prepack(model: nn.Module) -> None:
    """Gives adapted layers a prepacked copy of their frozen matrices, for passes without gradient on a CPU.

    Layers that are divided among ranks stay as they are.
    """
    for layer in model.modules():
        if type(layer) is LoraLinear and layer.joined[0] is layer and layer.quantized is None:
            layer.prepacked = Prepacked([one.weight for one in layer.joined], [one.bias for one in layer.joined])


# The loop over runs


def parameters_of(layers: Sequence[LoraLinear], runs: Sequence[Run]) -> list[Tensor]:
    """Inputs for an autograd function, in the order in which `backward` returns their gradients: A and B of each layer
    and run, or the anchor of the run's `gradient` in their place."""
    found = []
    for layer in layers:
        for run in runs:
            weights = run.adapter.weights.get(layer.name)
            if weights is not None:
                found += [weights.a_R_I, weights.b_O_R] if run.gradient is None else [run.gradient.anchor]
    return found


def forward(x_T_I: Tensor, layers: Sequence[LoraLinear], runs: Sequence[Run]) -> tuple[Tensor, list[Tensor]]:
    """Computes layers that read the same input. Returns their outputs side by side, [T, S], and the tensors that
    `backward` takes as `lows`: x A^T [n, R] for each layer and each run that is not merged."""
    y_T_S = x_T_I.new_empty(x_T_I.shape[0], sum(layer.num_outputs for layer in layers))
    lows = []
    for layer, y_T_O in zip(layers, _columns(y_T_S, layers), strict=True):
        shares = _shares(layer, runs, x_T_I)
        for rows, weight_O_I in _pieces(layer.dense(), shares, x_T_I.shape[0]):
            torch.mm(_take(x_T_I, rows), weight_O_I.T, out=_take(y_T_O, rows))
        if (bias_O := layer.bias) is not None:
            y_T_O.add_(bias_O)
        for run, weights, is_merged in shares:
            if not is_merged:
                low_n_R = torch.mm(_take(x_T_I, run.rows), weights.a_R_I.T)
                add_rows(y_T_O, run.rows, low_n_R, weights.b_O_R.T, run.adapter.scaling)
                lows.append(low_n_R)
    return y_T_S, lows


def backward(
    x_T_I: Tensor,
    layers: Sequence[LoraLinear],
    runs: Sequence[Run],
    lows: Sequence[Tensor],
    grad_T_S: Tensor,
    *,
    need_x: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of x (None unless `need_x`) and of `parameters_of(layers, runs)`, from the gradient of the
    outputs."""
    grad_x_T_I = torch.empty_like(x_T_I) if need_x else None
    grads: list[Tensor | None] = []
    low = iter(lows)
    for number, (layer, grad_T_O) in enumerate(zip(layers, _columns(grad_T_S, layers), strict=True)):
        shares = _shares(layer, runs, x_T_I)
        if grad_x_T_I is not None:
            for rows, weight_O_I in _pieces(layer.dense(), shares, x_T_I.shape[0]):
                if number == 0:
                    torch.mm(_take(grad_T_O, rows), weight_O_I, out=_take(grad_x_T_I, rows))
                else:
                    _take(grad_x_T_I, rows).addmm_(_take(grad_T_O, rows), weight_O_I)
        for run, weights, is_merged in shares:
            x_n_I, grad_n_O = _take(x_T_I, run.rows), _take(grad_T_O, run.rows)
            low_n_R = torch.mm(x_n_I, weights.a_R_I.T) if is_merged else next(low)
            grad_low_n_R = torch.mm(grad_n_O, weights.b_O_R)
            if grad_x_T_I is not None and not is_merged:
                add_rows(grad_x_T_I, run.rows, grad_low_n_R, weights.a_R_I, run.adapter.scaling)
            grads += _gradients(run, layer.name, x_n_I, low_n_R, grad_n_O, grad_low_n_R)
    return grad_x_T_I, grads


def add_rows(out: Tensor, rows: slice | Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """out[rows] += alpha * left @ right, in place."""
    if isinstance(rows, slice):
        _take(out, rows).addmm_(left, right, alpha=alpha)
    else:
        out.index_add_(0, rows, left @ right, alpha=alpha)


def _take(x: Tensor, rows: slice | Tensor) -> Tensor:
    """x[rows]. Returns x itself for all rows, because making a view takes as long as a product of few rows."""
    return x if isinstance(rows, slice) and rows.start == 0 and rows.stop == x.shape[0] else x[rows]


def _columns(y_T_S: Tensor, layers: Sequence[LoraLinear]) -> Sequence[Tensor]:
    """The outputs of each layer, [T, O], as views."""
    if len(layers) == 1:
        return (y_T_S,)
    return torch.split_with_sizes(y_T_S, [layer.num_outputs for layer in layers], 1)


def _shares(layer: LoraLinear, runs: Sequence[Run], x_T_I: Tensor) -> list[tuple[Run, LoraWeights, bool]]:
    """The runs whose adapter has the layer, with A and B in the dtype of x, and whether the run is merged: whether
    W + scaling B A is computed as one matrix for the run's rows.

    On a CPU, memory bounds the speed with and without merging. Merging reads and writes W twice, in forward and in
    backward. Without merging, each of the run's rows of the output, and of the input's gradient, is read and written
    once more. Half precision is never merged, because W + scaling B A would round a small share away.
    """
    dtype = x_T_I.dtype
    found = []
    for run in runs:
        weights = run.weights(layer.name)
        if weights is None:
            continue
        rows, is_merged = run.rows, False
        if weights.a_R_I.dtype != dtype:
            weights = LoraWeights(weights.a_R_I.to(dtype), weights.b_O_R.to(dtype))
        elif isinstance(rows, slice) and rows.stop - rows.start > layer.merges_above:
            is_merged = x_T_I.device.type == "cpu" and dtype in (torch.float32, torch.float64)
        found.append((run, weights, is_merged))
    return found


def _pieces(
    weight_O_I: Tensor, shares: Sequence[tuple[Run, LoraWeights, bool]], num_rows: int
) -> Iterator[tuple[slice, Tensor]]:
    """Slices that cover all rows, in order, each with the weight for its rows.

    A merged matrix is made when its slice is reached, and made again in backward. Keeping all merged matrices until
    backward would take as much memory as a model.
    """
    merged = [(run.rows, run, weights) for run, weights, is_merged in shares if is_merged]
    if not merged:
        yield slice(0, num_rows), weight_O_I
        return
    row = 0
    for rows, run, weights in sorted(merged, key=lambda one: one[0].start):  # type: ignore[union-attr]
        assert isinstance(rows, slice)
        if rows.start > row:
            yield slice(row, rows.start), weight_O_I
        yield rows, torch.addmm(weight_O_I.T, weights.a_R_I.T, weights.b_O_R.T, alpha=run.adapter.scaling).T
        row = rows.stop
    if row < num_rows:
        yield slice(row, num_rows), weight_O_I


def _gradients(
    run: Run, name: str, x_n_I: Tensor, low_n_R: Tensor, grad_n_O: Tensor, grad_low_n_R: Tensor
) -> list[Tensor | None]:
    """The gradients of A and B of one layer; [None] if they were added to the run's `gradient`."""
    scaling = run.adapter.scaling
    if run.gradient is None:
        grad_a_R_I, grad_b_R_O = (grad_low_n_R.T @ x_n_I).mul_(scaling), (low_n_R.T @ grad_n_O).mul_(scaling)
        dtype = run.adapter.flat.dtype
        return [grad_a_R_I.to(dtype), grad_b_R_O.T.to(dtype)]
    there = run.gradient.of(name)
    if there.a_R_I.dtype == x_n_I.dtype:
        there.a_R_I.addmm_(grad_low_n_R.T, x_n_I, alpha=scaling)
    else:
        there.a_R_I.add_(grad_low_n_R.T @ x_n_I, alpha=scaling)
    if there.a_R_I.dtype == x_n_I.dtype and x_n_I.shape[0] <= _FEW_ROWS:
        there.b_O_R.addmm_(grad_n_O.T, low_n_R, alpha=scaling)
    else:  # a product [R, O] of a few long rows takes half the time of its transpose
        there.b_O_R.add_((low_n_R.T @ grad_n_O).T, alpha=scaling)
    return [None]


class _Linear(torch.autograd.Function):
    """One LoraLinear, differentiated by hand, because autograd over slices would copy the whole [T, O] for every
    run."""

    @staticmethod
    def forward(ctx: Any, x_T_I: Tensor, layer: LoraLinear, runs: Sequence[Run], *parameters: Tensor) -> Tensor:
        y_T_O, lows = forward(x_T_I, [layer], runs)
        # The weight and the parameters are saved so that autograd notices if they were changed.
        weight = [layer.weight] if layer.quantized is None else []
        ctx.save_for_backward(x_T_I, *weight, *parameters, *lows)
        ctx.layer, ctx.runs, ctx.num_lows = layer, runs, len(lows)
        return y_T_O

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_T_I, *rest = ctx.saved_tensors
        lows = rest[len(rest) - ctx.num_lows :]
        grad_x_T_I, grads = backward(
            x_T_I, [ctx.layer], ctx.runs, lows, grad_outputs[0], need_x=ctx.needs_input_grad[0]
        )
        return grad_x_T_I, None, None, *grads
