"""Frozen linear layers that read the same input, such as q, k and v, with the shares of adapters in them.

Together they need one product for all A that one adapter has there, and one buffer for the input's gradient. `project`
is for autograd; `forward` and `backward` are its two halves, for who differentiates by hand.

Shapes: T packed tokens, n rows of one share, I input features, O output features, R rank, S ranks of a share added up,
G shares that are computed as one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tinsmith.modeling.adapter import LoraWeights
from tinsmith.modeling.pass_gradient import PassGradient

_FEW_ROWS = 64
"""Up to so many, what a product costs is its call."""


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
    names: Sequence[str] = ()
    """Of the layers."""
    gradient: PassGradient | None = None
    """Where the gradients are written, by the layers' names. None: to tensors of their own."""

    @property
    def layers(self) -> list[int]:
        """Those that the adapter has."""
        return [n for n, weights in enumerate(self.weights) if weights is not None]

    @property
    def parameters(self) -> list[Tensor]:
        """A and B in turn of these layers."""
        return [tensor for weights in self.weights if weights is not None for tensor in (weights.a_R_I, weights.b_O_R)]


def project(x_T_I: Tensor, layers: Sequence[Frozen], shares: Sequence[Share]) -> Sequence[Tensor]:
    """[T, O] of each layer. Differentiable in x, A and B; no two shares have a row in common."""
    if not shares:
        return [torch.nn.functional.linear(x_T_I, layer.weight_O_I, layer.bias_O) for layer in layers]
    outputs = _Project.apply(x_T_I, layers, shares, *parameters_of(shares))
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def parameters_of(shares: Sequence[Share]) -> list[Tensor]:
    """Of all shares, in the order in which `backward` has their gradients."""
    return [tensor for share in shares for tensor in share.parameters]


class _Project(torch.autograd.Function):
    """By hand, because autograd over slices would copy the whole [T, O] for every share."""

    @staticmethod
    def forward(ctx: Any, x_T_I: Tensor, layers: Sequence[Frozen], shares: Sequence[Share], *parameters: Tensor) -> Any:
        outputs, lows = forward(x_T_I, layers, shares)
        ctx.merged = lows is None
        ctx.save_for_backward(x_T_I, *(layer.weight_O_I for layer in layers), *parameters, *(lows or ()))
        ctx.layers, ctx.shares, ctx.num_parameters = layers, shares, len(parameters)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads_T_O: Tensor) -> tuple[Tensor | None, ...]:
        x_T_I, *rest = ctx.saved_tensors  # weights and parameters among them, to know that nobody has changed them
        lows = None if ctx.merged else rest[len(ctx.layers) + ctx.num_parameters :]
        grad_x_T_I, grads = backward(x_T_I, ctx.layers, ctx.shares, lows, grads_T_O, need_x=ctx.needs_input_grad[0])
        return grad_x_T_I, None, None, *grads


def forward(
    x_T_I: Tensor, layers: Sequence[Frozen], shares: Sequence[Share], outputs: Sequence[Tensor] | None = None
) -> tuple[Sequence[Tensor], list[Tensor] | None]:
    """The outputs, in `outputs` if given, and what `backward` wants to see again."""
    if outputs is None:
        outputs = [x_T_I.new_empty(x_T_I.shape[0], layer.weight_O_I.shape[0]) for layer in layers]
    if shares and all(_worth_merging(x_T_I, share, layers) for share in shares):
        weights = [layer.weight_O_I for layer in layers]
        for rows, there in _segments(weights, shares, x_T_I.shape[0]):
            for output, weight_O_I in zip(outputs, there, strict=True):
                torch.mm(x_T_I[rows], weight_O_I.T, out=output[rows])
        _add_biases(outputs, layers)
        return outputs, None
    for output, layer in zip(outputs, layers, strict=True):
        torch.mm(x_T_I, layer.weight_O_I.T, out=output)
    _add_biases(outputs, layers)
    lows = []
    for block in _blocks(shares, x_T_I.shape[0]):
        low = _product(block.of(x_T_I), block.a(x_T_I.dtype).mT)
        for layer, part, b in zip(block.layers, block.split(low), block.bs(x_T_I.dtype), strict=True):
            block.add(outputs[layer], part, b.mT, alpha=block.scaling)
        lows.append(low)
    return outputs, lows


def backward(
    x_T_I: Tensor,
    layers: Sequence[Frozen],
    shares: Sequence[Share],
    lows: Sequence[Tensor] | None,
    grads_T_O: Sequence[Tensor],
    *,
    need_x: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradient of x, when it is needed, and of every share's A and B in turn."""
    grad_x_T_I = None
    if need_x:
        grad_x_T_I = torch.empty_like(x_T_I)
        weights = [layer.weight_O_I for layer in layers]
        if lows is None:
            for rows, there in _segments(weights, shares, x_T_I.shape[0]):
                _sum_of_products(grad_x_T_I[rows], [grad_T_O[rows] for grad_T_O in grads_T_O], there)
        else:
            _sum_of_products(grad_x_T_I, grads_T_O, weights)
    grads: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for number, block in enumerate(_blocks(shares, x_T_I.shape[0])):
        x_n_I, a_S_I = block.of(x_T_I), block.a(x_T_I.dtype)
        low = _product(x_n_I, a_S_I.mT) if lows is None else lows[number]
        grads_n_O = [block.of(grads_T_O[layer]) for layer in block.layers]
        parts = [_product(grad, b) for grad, b in zip(grads_n_O, block.bs(x_T_I.dtype), strict=True)]
        grad_low = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(block.scaling)
        grads.update(block.gradients(x_n_I, low, grad_low, grads_n_O))
        if grad_x_T_I is not None and lows is not None:
            block.add(grad_x_T_I, grad_low, a_S_I, alpha=1.0)
    return grad_x_T_I, [grad for n, share in enumerate(shares) for m in share.layers for grad in grads[n, m]]


@dataclass(frozen=True, slots=True)
class _Block:
    """Shares that follow each other on as many rows each, of one rank and with the same layers: one batched product
    instead of many. A single share is a block too, without the dimension G."""

    first: int
    shares: Sequence[Share]
    rows: slice | Tensor | None
    """Of all of them; None means all rows that there are."""
    layers: Sequence[int]

    @property
    def scaling(self) -> float:
        return self.shares[0].scaling

    def of(self, x_T_C: Tensor) -> Tensor:
        """[n, C], or [G, n, C]."""
        x = x_T_C if self.rows is None else x_T_C[self.rows]
        return x if len(self.shares) == 1 else x.unflatten(0, (len(self.shares), -1))

    def a(self, dtype: torch.dtype) -> Tensor:
        """[S, I], or [G, S, I]."""
        matrices = [self._weights(share, layer).a_R_I for share in self.shares for layer in self.layers]
        if len(matrices) == 1:
            return matrices[0].to(dtype)
        a = torch.cat(matrices).to(dtype)
        return a if len(self.shares) == 1 else a.unflatten(0, (len(self.shares), -1))

    def bs(self, dtype: torch.dtype) -> list[Tensor]:
        """[O, R], or [G, O, R], of each layer."""
        if len(self.shares) == 1:
            return [self._weights(self.shares[0], layer).b_O_R.to(dtype) for layer in self.layers]
        return [
            torch.stack([self._weights(share, layer).b_O_R for share in self.shares]).to(dtype) for layer in self.layers
        ]

    def split(self, low: Tensor) -> Sequence[Tensor]:
        """The columns of each layer."""
        if len(self.layers) == 1:
            return (low,)
        return low.split([self._weights(self.shares[0], layer).a_R_I.shape[0] for layer in self.layers], -1)

    def add(self, out_T_C: Tensor, left: Tensor, right: Tensor, *, alpha: float) -> None:
        """Adds alpha * left @ right to the block's rows, in place."""
        if isinstance(self.rows, Tensor):
            out_T_C.index_add_(0, self.rows, left @ right, alpha=alpha)
        elif len(self.shares) == 1:
            self.of(out_T_C).addmm_(left, right, alpha=alpha)
        else:
            self.of(out_T_C).baddbmm_(left, right, alpha=alpha)

    def gradients(
        self, x_n_I: Tensor, low_n_S: Tensor, grad_low_n_S: Tensor, grads_n_O: Sequence[Tensor]
    ) -> Iterator[tuple[tuple[int, int], tuple[Tensor, Tensor]]]:
        """Those of A and B, by the numbers of share and layer, where the shares want them."""
        parts = self.split(low_n_S)
        if len(self.shares) == 1 and x_n_I.shape[0] <= _FEW_ROWS and self.shares[0].gradient is not None:
            for layer, low, grad_low, grad in zip(self.layers, parts, self.split(grad_low_n_S), grads_n_O, strict=True):
                yield (self.first, layer), self._written(layer, x_n_I, low, grad_low, grad)
            return
        # The product of a few long rows with the gradient is three times as fast as its transpose.
        grads_b_R_O = [_product(low.mT, grad) for low, grad in zip(parts, grads_n_O, strict=True)]
        grad_a_S_I = _product(grad_low_n_S.mT, x_n_I)
        each = [grad_a_S_I] if len(self.shares) == 1 else grad_a_S_I.unbind()
        for g, (share, mine) in enumerate(zip(self.shares, each, strict=True)):
            for layer, grad_a_R_I, grad_b_R_O in zip(self.layers, self._rows(mine), grads_b_R_O, strict=True):
                grad_b_O_R = (grad_b_R_O if len(self.shares) == 1 else grad_b_R_O[g]).T
                yield (self.first + g, layer), _written(share, layer, grad_a_R_I, grad_b_O_R)

    def _written(
        self, layer: int, x_n_I: Tensor, low_n_R: Tensor, grad_low_n_R: Tensor, grad_n_O: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of a single share with few rows, where the number of operations counts: right into its buffer."""
        (share,) = self.shares
        assert share.gradient is not None
        there = share.gradient.take(share.names[layer])
        if there is None or there.a_R_I.dtype != x_n_I.dtype:
            return _kept(share, layer, grad_low_n_R.T @ x_n_I, grad_n_O.T @ low_n_R, there)
        grad_a_R_I = torch.mm(grad_low_n_R.T, x_n_I, out=there.a_R_I)
        grad_b_O_R = torch.addmm(there.b_O_R, grad_n_O.T, low_n_R, beta=0, alpha=self.scaling, out=there.b_O_R)
        return grad_a_R_I, grad_b_O_R

    def _rows(self, grad_a_S_I: Tensor) -> Sequence[Tensor]:
        if len(self.layers) == 1:
            return (grad_a_S_I,)
        return grad_a_S_I.split([self._weights(self.shares[0], layer).a_R_I.shape[0] for layer in self.layers])

    @staticmethod
    def _weights(share: Share, layer: int) -> LoraWeights:
        return cast(LoraWeights, share.weights[layer])


def _blocks(shares: Sequence[Share], num_rows: int) -> list[_Block]:
    """All shares, in order."""
    out, first = [], 0
    for n, share in enumerate(shares):
        if n + 1 == len(shares) or not _is_followed(share, shares[n + 1]):
            rows = share.rows
            if isinstance(rows, slice):
                rows = slice(cast(slice, shares[first].rows).start, rows.stop)
            is_all = isinstance(rows, slice) and rows == slice(0, num_rows)
            out.append(_Block(first, shares[first : n + 1], None if is_all else rows, share.layers))
            first = n + 1
    return out


def _is_followed(share: Share, after: Share) -> bool:
    """Whether the two can be one block."""
    if not isinstance(share.rows, slice) or not isinstance(after.rows, slice):
        return False
    adjoin = share.rows.stop == after.rows.start
    as_many = share.rows.stop - share.rows.start == after.rows.stop - after.rows.start
    return adjoin and as_many and share.scaling == after.scaling and _ranks(share) == _ranks(after)


def _ranks(share: Share) -> list[int]:
    """Of each layer; 0 where the adapter has none."""
    return [0 if weights is None else weights.a_R_I.shape[0] for weights in share.weights]


def _written(share: Share, layer: int, grad_a_R_I: Tensor, grad_b_O_R: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients, in the dtypes of A and B, where the share wants them. That of B comes unscaled."""
    there = None if share.gradient is None else share.gradient.take(share.names[layer])
    return _kept(share, layer, grad_a_R_I, grad_b_O_R, there)


def _kept(
    share: Share, layer: int, grad_a_R_I: Tensor, grad_b_O_R: Tensor, there: LoraWeights | None
) -> tuple[Tensor, Tensor]:
    if there is None:
        weights = cast(LoraWeights, share.weights[layer])
        return grad_a_R_I.to(weights.a_R_I.dtype), grad_b_O_R.mul_(share.scaling).to(weights.b_O_R.dtype)
    return there.a_R_I.copy_(grad_a_R_I), torch.mul(grad_b_O_R, share.scaling, out=there.b_O_R)


def _worth_merging(x_T_I: Tensor, share: Share, layers: Sequence[Frozen]) -> bool:
    """Whether W + scaling B A costs less than adding the share to so many rows, forward and backward.

    On a CPU both are bound by memory: W is read and written twice, each row of the output and of the input's gradient
    once more. Not in half precision, in which a small share would be rounded away.
    """
    if not isinstance(share.rows, slice) or x_T_I.is_cuda or x_T_I.dtype not in (torch.float32, torch.float64):
        return False
    weights = [layers[n].weight_O_I for n in share.layers]
    num_rows = share.rows.stop - share.rows.start
    many = num_rows * sum(sum(one.shape) for one in weights) > 2 * sum(one.numel() for one in weights)
    return many and all(one.dtype == x_T_I.dtype for one in share.parameters)


def _segments(
    weights: Sequence[Tensor], shares: Sequence[Share], num_rows: int
) -> Iterator[tuple[slice, list[Tensor]]]:
    """All rows, in order, and every layer's weights there, with the share that has the rows merged in.

    They are made one after the other, and again in backward: waiting for it, they would take the memory of a model.
    """
    row = 0
    for share in sorted(shares, key=lambda share: cast(slice, share.rows).start):
        rows = cast(slice, share.rows)
        if rows.start > row:
            yield slice(row, rows.start), list(weights)
        there = list(weights)
        for layer in share.layers:
            mine = cast(LoraWeights, share.weights[layer])
            there[layer] = torch.addmm(weights[layer].T, mine.a_R_I.T, mine.b_O_R.T, alpha=share.scaling).T
        yield rows, there
        row = rows.stop
    if row < num_rows:
        yield slice(row, num_rows), list(weights)


def _add_biases(outputs: Sequence[Tensor], layers: Sequence[Frozen]) -> None:
    for output, layer in zip(outputs, layers, strict=True):
        if layer.bias_O is not None:
            output.add_(layer.bias_O)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, of a block or of a batch of them, with less around it."""
    return torch.mm(left, right) if left.ndim == 2 else torch.bmm(left, right)


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
