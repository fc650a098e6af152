"""Frozen linear layers that read the same input, such as q, k and v, with the shares of adapters.

Together they need one product for all of an adapter's A, and one buffer for the input's gradient. `project` is for
autograd. `forward` and `backward` are its halves, for layers that are differentiated by hand.

Shapes: T packed tokens, I input features, O output features, S outputs of all layers side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith.modeling.merging import segments, worth_merging
from tinsmith.modeling.shares import Share, blocks, parameters_of


@dataclass(frozen=True, slots=True)
class Frozen:
    """Weights of one layer, y = x W^T + b."""

    weight_O_I: Tensor
    bias_O: Tensor | None = None


class Layers:
    """Frozen layers that read the same input, in order."""

    def __init__(self, frozen: Sequence[Frozen], whole: Frozen | None = None) -> None:
        """whole: all layers as one, if their matrices are views of consecutive rows of its matrix."""
        self.frozen = frozen
        self.widths = [one.weight_O_I.shape[0] for one in frozen]
        self._whole = frozen[0] if len(frozen) == 1 else whole

    @property
    def whole(self) -> Frozen | None:
        """All layers as one. None if there is no such matrix, and while the model's parameters are not those with which
        this was made."""
        whole = self._whole
        same = whole is not None and whole.weight_O_I.data_ptr() == self.frozen[0].weight_O_I.data_ptr()
        return whole if same else None


def project(x_T_I: Tensor, layers: Layers, shares: Sequence[Share]) -> Sequence[Tensor]:
    """The output [T, O] of each layer, differentiable in x, A and B. Shares must not overlap in rows."""
    if not shares:
        return [torch.nn.functional.linear(x_T_I, layer.weight_O_I, layer.bias_O) for layer in layers.frozen]
    outputs = _Project.apply(x_T_I, layers, shares, *parameters_of(shares))
    return (outputs,) if isinstance(outputs, Tensor) else outputs


class _Project(torch.autograd.Function):
    """Differentiated by hand, because autograd over slices would copy the whole [T, O] for every share."""

    @staticmethod
    def forward(ctx: Any, x_T_I: Tensor, layers: Layers, shares: Sequence[Share], *parameters: Tensor) -> Any:
        outputs = [x_T_I.new_empty(x_T_I.shape[0], width) for width in layers.widths]
        lows = _forward(x_T_I, layers.frozen, shares, outputs, outputs)
        ctx.merged = lows is None
        ctx.num_parameters = len(parameters)
        weights = (layer.weight_O_I for layer in layers.frozen)
        ctx.save_for_backward(x_T_I, *weights, *parameters, *(lows or ()))
        ctx.layers, ctx.shares = layers, shares
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads_T_O: Tensor) -> tuple[Tensor | None, ...]:
        x_T_I, *rest = ctx.saved_tensors  # with weights and parameters, so that autograd notices if they were changed
        frozen = ctx.layers.frozen
        lows = None if ctx.merged else rest[len(frozen) + ctx.num_parameters :]
        grad_x_T_I, grads = _backward(
            x_T_I, frozen, ctx.shares, lows, grads_T_O, grads_T_O, need_x=ctx.needs_input_grad[0]
        )
        return grad_x_T_I, None, None, *grads


def forward(x_T_I: Tensor, layers: Layers, shares: Sequence[Share]) -> tuple[Tensor, list[Tensor] | None]:
    """The outputs side by side, [T, sum of O], and the tensors that `backward` takes as `lows`: None if the shares were
    merged into the weights."""
    y_T_S = x_T_I.new_empty(x_T_I.shape[0], sum(layers.widths))
    outputs = _columns(y_T_S, layers)
    if (whole := layers.whole) is not None:
        return y_T_S, _forward(x_T_I, [whole], shares, [y_T_S], outputs, layers.widths)
    return y_T_S, _forward(x_T_I, layers.frozen, shares, outputs, outputs)


def backward(
    x_T_I: Tensor,
    layers: Layers,
    shares: Sequence[Share],
    lows: Sequence[Tensor] | None,
    grad_T_S: Tensor,
    *,
    need_x: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of x, if needed, and of `parameters_of(shares)`, from that of the outputs side by side."""
    grads_T_O = _columns(grad_T_S, layers)
    if (whole := layers.whole) is not None:
        return _backward(x_T_I, [whole], shares, lows, [grad_T_S], grads_T_O, layers.widths, need_x=need_x)
    return _backward(x_T_I, layers.frozen, shares, lows, grads_T_O, grads_T_O, need_x=need_x)


def _columns(y_T_S: Tensor, layers: Layers) -> Sequence[Tensor]:
    return (y_T_S,) if len(layers.widths) == 1 else torch.split_with_sizes(y_T_S, layers.widths, 1)


def _forward(
    x_T_I: Tensor,
    frozen: Sequence[Frozen],
    shares: Sequence[Share],
    products: Sequence[Tensor],
    outputs: Sequence[Tensor],
    widths: Sequence[int] | None = None,
) -> list[Tensor] | None:
    """Fills `products`, one for each of `frozen`. `outputs` are views of them, one for each layer.

    widths: output features of the layers, if `frozen` is all of them as one.
    """
    weights = [layer.weight_O_I for layer in frozen]
    merged = bool(shares) and all(worth_merging(x_T_I, share, outputs) for share in shares)
    if merged:
        for rows, there in segments(weights, shares, x_T_I.shape[0], widths):
            for product, weight_O_I in zip(products, there, strict=True):
                torch.mm(x_T_I[rows], weight_O_I.T, out=product[rows])
    else:
        for product, weight_O_I in zip(products, weights, strict=True):
            torch.mm(x_T_I, weight_O_I.T, out=product)
    for product, layer in zip(products, frozen, strict=True):
        if layer.bias_O is not None:
            product.add_(layer.bias_O)
    if merged:
        return None
    return [low for block in blocks(shares, x_T_I) for low in block.forward(x_T_I, outputs)]


def _backward(
    x_T_I: Tensor,
    frozen: Sequence[Frozen],
    shares: Sequence[Share],
    lows: Sequence[Tensor] | None,
    grads_of_products: Sequence[Tensor],
    grads_T_O: Sequence[Tensor],
    widths: Sequence[int] | None = None,
    *,
    need_x: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    grad_x_T_I = None
    if need_x:
        weights = [layer.weight_O_I for layer in frozen]
        grad_x_T_I = torch.empty_like(x_T_I)
        if lows is None:
            for rows, there in segments(weights, shares, x_T_I.shape[0], widths):
                _sum_of_products(grad_x_T_I[rows], [grad[rows] for grad in grads_of_products], there)
        else:
            _sum_of_products(grad_x_T_I, grads_of_products, weights)
    grads: list[Tensor | None] = []
    saved = None if lows is None else iter(lows)
    for block in blocks(shares, x_T_I):
        grads += block.backward(x_T_I, saved, grads_T_O, grad_x_T_I)
    return grad_x_T_I, grads


def _sum_of_products(out: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    torch.mm(left[0], right[0], out=out)
    for a, b in zip(left[1:], right[1:], strict=True):
        out.addmm_(a, b)
