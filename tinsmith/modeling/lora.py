"""Many adapters, of different ranks and targets, in one packed batch.

Shapes: T packed tokens, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.kernels.grouped_lora import Groups


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of the packed batch that one adapter serves."""

    adapter: Adapter
    rows: slice | Tensor
    """A slice, or int64 [n] row numbers."""


@dataclass(slots=True)
class ActiveRuns:
    """What the adapted layers of a base model apply at this moment; one compute thread sets and reads it."""

    runs: Sequence[Run] = field(default_factory=tuple)
    groups: Groups | None = None
    """The same runs, where grouped matrix products serve them."""


class LoraLinear(nn.Module):
    """A frozen linear layer that adds the active adapters' share to their rows."""

    def __init__(self, base: nn.Linear, name: str, active: ActiveRuns) -> None:
        super().__init__()
        if base.weight.device.type == "cpu":
            # Column-major: with some 8 rows (a small decode step) it takes a third of the time, with many the same.
            base.weight.data = base.weight.data.T.contiguous().T
        self.weight = base.weight
        self.bias = base.bias
        self.name = name
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        if self.active.groups is not None:
            y = self.active.groups.linear(x.flatten(0, -2), self.weight, self.bias, self.name)
            if y is not None:
                return y.unflatten(0, x.shape[:-1])
        pieces = [
            (run.rows, run.adapter.scaling, weights)
            for run in self.active.runs
            if (weights := run.adapter.weights.get(self.name)) is not None
        ]
        if not pieces:
            return nn.functional.linear(x, self.weight, self.bias)
        shape = x.shape
        x_T_I = x.reshape(-1, shape[-1])
        rows = [piece[0] for piece in pieces]
        scalings = [piece[1] for piece in pieces]
        parameters = [tensor for _, _, weights in pieces for tensor in (weights.a_R_I, weights.b_O_R)]
        if torch.is_grad_enabled():
            y_T_O = _LoraLinearFunction.apply(x_T_I, self.weight, self.bias, rows, scalings, *parameters)
        else:  # a decode step of one token would spend most of its time in autograd's own bookkeeping
            y_T_O, _ = _forward(x_T_I, self.weight, self.bias, rows, scalings, parameters)
        return y_T_O.view(*shape[:-1], -1)


def _forward(
    x_T_I: Tensor,
    weight_O_I: Tensor,
    bias_O: Tensor | None,
    rows: Sequence[slice | Tensor],
    scalings: Sequence[float],
    parameters: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """y = x W^T + b, plus scaling * (x A^T) B^T on each run's rows, written in place; and each run's x A^T [n, R].

    `parameters` are A and B of each run in turn.
    """
    y_T_O = nn.functional.linear(x_T_I, weight_O_I, bias_O)
    lows = []
    for where, scaling, a_R_I, b_O_R in zip(rows, scalings, parameters[::2], parameters[1::2], strict=True):
        low_n_R = x_T_I[where] @ a_R_I.to(x_T_I.dtype).T
        add_rows(y_T_O, where, low_n_R, b_O_R.to(x_T_I.dtype).T, scaling)
        lows.append(low_n_R)
    return y_T_O, lows


class _LoraLinearFunction(torch.autograd.Function):
    """_forward with a gradient. By hand, because autograd over slices would copy the whole [T, O] for every run."""

    @staticmethod
    def forward(
        ctx: Any,
        x_T_I: Tensor,
        weight_O_I: Tensor,
        bias_O: Tensor | None,
        rows: list[slice | Tensor],
        scalings: list[float],
        *parameters: Tensor,
    ) -> Tensor:
        y_T_O, lows = _forward(x_T_I, weight_O_I, bias_O, rows, scalings, parameters)
        ctx.save_for_backward(x_T_I, weight_O_I, *parameters, *lows)
        ctx.rows, ctx.scalings = rows, scalings
        return y_T_O

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_T_O,) = grad_outputs
        rows, scalings = ctx.rows, ctx.scalings
        x_T_I, weight_O_I, *rest = ctx.saved_tensors
        parameters, lows = rest[: 2 * len(rows)], rest[2 * len(rows) :]
        grad_x = grad_T_O @ weight_O_I if ctx.needs_input_grad[0] else None
        grads: list[Tensor | None] = []
        for n, (where, scaling) in enumerate(zip(rows, scalings, strict=True)):
            a_R_I, b_O_R = parameters[2 * n], parameters[2 * n + 1]
            grad_n_O = grad_T_O[where]
            grad_low_n_R = (grad_n_O @ b_O_R.to(grad_n_O.dtype)).mul_(scaling)
            if ctx.needs_input_grad[5 + 2 * n]:
                grads.append((grad_low_n_R.T @ x_T_I[where]).to(a_R_I.dtype))
                grads.append((grad_n_O.T @ lows[n]).mul_(scaling).to(b_O_R.dtype))
            else:
                grads += [None, None]
            if grad_x is not None:
                add_rows(grad_x, where, grad_low_n_R, a_R_I.to(grad_n_O.dtype), 1.0)
        return grad_x, None, None, None, None, *grads


def add_rows(out: Tensor, rows: slice | Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """out[rows] += alpha * left @ right, in place."""
    if isinstance(rows, slice):
        out[rows].addmm_(left, right, alpha=alpha)
    else:
        out.index_add_(0, rows, left @ right, alpha=alpha)
