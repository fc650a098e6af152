"""Frozen linear layers that read the same input, such as q, k and v, with the shares of adapters in them.

Together they need one product for all A that one adapter has there, and one buffer for the input's gradient.

Shapes: T packed tokens, n rows of one share, I input features, O output features, R rank, S ranks of a share added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tinsmith.modeling.adapter import LoraWeights


@dataclass(frozen=True, slots=True)
class Frozen:
    """One of the layers: y = x W^T + b."""

    weight_O_I: Tensor
    bias_O: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """What one adapter adds on its rows: scaling * (x A^T) B^T for every layer that it has."""

    rows: slice | Tensor
    """A slice, or int64 [n] row numbers."""
    scaling: float
    weights: Sequence[LoraWeights | None]
    """One entry for each layer; not all of them None."""

    @property
    def layers(self) -> list[int]:
        """Those that the adapter has."""
        return [n for n, weights in enumerate(self.weights) if weights is not None]


def project(x_T_I: Tensor, layers: Sequence[Frozen], shares: Sequence[Share]) -> Sequence[Tensor]:
    """[T, O] of each layer. Differentiable in x, A and B; no two shares have a row in common."""
    if not shares:
        return [torch.nn.functional.linear(x_T_I, layer.weight_O_I, layer.bias_O) for layer in layers]
    parameters = [tensor for share in shares for w in share.weights if w is not None for tensor in (w.a_R_I, w.b_O_R)]
    outputs = _Project.apply(x_T_I, layers, shares, *parameters)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


class _Project(torch.autograd.Function):
    """By hand, because autograd over slices would copy the whole [T, O] for every share."""

    @staticmethod
    def forward(ctx: Any, x_T_I: Tensor, layers: Sequence[Frozen], shares: Sequence[Share], *parameters: Tensor) -> Any:
        ctx.merged = all(_worth_merging(x_T_I, share, layers, parameters) for share in shares)
        if ctx.merged:
            outputs, lows = _merged_forward(x_T_I, layers, shares, parameters), []
        else:
            outputs, lows = _forward(x_T_I, layers, shares, parameters)
        ctx.save_for_backward(x_T_I, *(layer.weight_O_I for layer in layers), *parameters, *lows)
        ctx.layers, ctx.shares, ctx.num_parameters = len(layers), shares, len(parameters)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads_T_O: Tensor) -> tuple[Tensor | None, ...]:
        x_T_I, *rest = ctx.saved_tensors
        weights, rest = rest[: ctx.layers], rest[ctx.layers :]
        parameters, lows = rest[: ctx.num_parameters], rest[ctx.num_parameters :]
        shares: Sequence[Share] = ctx.shares
        grad_x_T_I = torch.empty_like(x_T_I) if ctx.needs_input_grad[0] else None
        if grad_x_T_I is not None and not ctx.merged:
            _sum_of_products(grad_x_T_I, grads_T_O, weights)
        grads: list[Tensor | None] = []
        for n, (share, mine) in enumerate(zip(shares, _by_share(shares, parameters), strict=True)):
            x_n_I = x_T_I[share.rows]
            grads_n_O = [grad_T_O[share.rows] for grad_T_O in grads_T_O]
            a_S_I = _stacked(mine[::2], x_T_I.dtype)
            columns = _columns(mine[::2])
            low_n_S = x_n_I @ a_S_I.T if ctx.merged else lows[n]
            grad_low_n_S = torch.empty_like(low_n_S)
            for layer, where, b_O_R in zip(share.layers, columns, mine[1::2], strict=True):
                torch.mm(grads_n_O[layer], b_O_R.to(x_T_I.dtype), out=grad_low_n_S[:, where])
            grad_low_n_S.mul_(share.scaling)
            grad_a_S_I = grad_low_n_S.T @ x_n_I
            for layer, where, a_R_I, b_O_R in zip(share.layers, columns, mine[::2], mine[1::2], strict=True):
                # The product of a few long rows with the gradient is three times as fast as its transpose.
                grad_b_R_O = (low_n_S[:, where].T @ grads_n_O[layer]).mul_(share.scaling)
                grads += [grad_a_S_I[where].to(a_R_I.dtype), grad_b_R_O.T.to(b_O_R.dtype)]
            if grad_x_T_I is not None and not ctx.merged:
                add_rows(grad_x_T_I, share.rows, grad_low_n_S, a_S_I, 1.0)
        if grad_x_T_I is not None and ctx.merged:
            for rows, there in _segments(weights, shares, parameters, x_T_I.shape[0]):
                _sum_of_products(grad_x_T_I[rows], [grad_T_O[rows] for grad_T_O in grads_T_O], there)
        return grad_x_T_I, None, None, *grads


def _forward(
    x_T_I: Tensor, layers: Sequence[Frozen], shares: Sequence[Share], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and x A^T [n, S] of each share."""
    outputs = [torch.nn.functional.linear(x_T_I, layer.weight_O_I, layer.bias_O) for layer in layers]
    lows = []
    for share, mine in zip(shares, _by_share(shares, parameters), strict=True):
        low_n_S = x_T_I[share.rows] @ _stacked(mine[::2], x_T_I.dtype).T
        for layer, where, b_O_R in zip(share.layers, _columns(mine[::2]), mine[1::2], strict=True):
            add_rows(outputs[layer], share.rows, low_n_S[:, where], b_O_R.to(x_T_I.dtype).T, share.scaling)
        lows.append(low_n_S)
    return outputs, lows


def _merged_forward(
    x_T_I: Tensor, layers: Sequence[Frozen], shares: Sequence[Share], parameters: Sequence[Tensor]
) -> list[Tensor]:
    outputs = [x_T_I.new_empty(x_T_I.shape[0], layer.weight_O_I.shape[0]) for layer in layers]
    weights = [layer.weight_O_I for layer in layers]
    for rows, there in _segments(weights, shares, parameters, x_T_I.shape[0]):
        for output, layer, weight_O_I in zip(outputs, layers, there, strict=True):
            torch.mm(x_T_I[rows], weight_O_I.T, out=output[rows])
            if layer.bias_O is not None:
                output[rows].add_(layer.bias_O)
    return outputs


def _worth_merging(x_T_I: Tensor, share: Share, layers: Sequence[Frozen], parameters: Sequence[Tensor]) -> bool:
    """Whether W + scaling B A costs less than adding the share to so many rows, forward and backward.

    On a CPU both are bound by memory: W is read and written twice, each row of the output and of the input's gradient
    once more. Not in half precision, in which a small share would be rounded away.
    """
    full = x_T_I.dtype in (torch.float32, torch.float64) and all(one.dtype == x_T_I.dtype for one in parameters)
    if not isinstance(share.rows, slice) or x_T_I.is_cuda or not full:
        return False
    weights = [layers[n].weight_O_I for n in share.layers]
    num_rows = share.rows.stop - share.rows.start
    return num_rows * sum(sum(one.shape) for one in weights) > 2 * sum(one.numel() for one in weights)


def _segments(
    weights: Sequence[Tensor], shares: Sequence[Share], parameters: Sequence[Tensor], num_rows: int
) -> Iterator[tuple[slice, list[Tensor]]]:
    """All rows, in order, and every layer's weights there, with the share that has the rows merged in.

    They are made one after the other, and again in backward: waiting for it, they would take the memory of a model.
    """
    row = 0
    for share, mine in sorted(
        zip(shares, _by_share(shares, parameters), strict=True), key=lambda pair: cast(slice, pair[0].rows).start
    ):
        rows = cast(slice, share.rows)
        if rows.start > row:
            yield slice(row, rows.start), list(weights)
        there = list(weights)
        for layer, a_R_I, b_O_R in zip(share.layers, mine[::2], mine[1::2], strict=True):
            there[layer] = torch.addmm(weights[layer].T, a_R_I.T, b_O_R.T, alpha=share.scaling).T
        yield rows, there
        row = rows.stop
    if row < num_rows:
        yield slice(row, num_rows), list(weights)


def _by_share(shares: Sequence[Share], parameters: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """A and B in turn of each share's layers."""
    out, first = [], 0
    for share in shares:
        last = first + 2 * len(share.layers)
        out.append(parameters[first:last])
        first = last
    return out


def _stacked(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))).to(dtype)


def _columns(matrices: Sequence[Tensor]) -> list[slice]:
    """Where each of them lies in their stack."""
    out, first = [], 0
    for matrix in matrices:
        out.append(slice(first, first + matrix.shape[0]))
        first = out[-1].stop
    return out


def _sum_of_products(out: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    torch.mm(left[0], right[0], out=out)
    for a, b in zip(left[1:], right[1:], strict=True):
        out.addmm_(a, b)


def add_rows(out: Tensor, rows: slice | Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """out[rows] += alpha * left @ right, in place."""
    if isinstance(rows, slice):
        out[rows].addmm_(left, right, alpha=alpha)
    else:
        out.index_add_(0, rows, left @ right, alpha=alpha)
