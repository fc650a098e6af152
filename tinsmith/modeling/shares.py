"""The shares of adapters, added to the rows of layers that read the same input. Forward and backward by hand.

Consecutive shares of equal form are computed as one batched product. A share of few rows is computed layer by layer.

Shapes: T packed tokens, n rows of one share, I input features, O output features, R rank, S ranks of a share added up,
G shares that are computed as one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from tinsmith.modeling.adapter import LoraWeights
from tinsmith.modeling.pass_gradient import PassGradient

_FEW_ROWS = 64
"""Up to this number of rows, a product costs its fixed time, so each layer has its own and nothing is concatenated."""


@dataclass(slots=True)
class Share:
    """One adapter's share, scaling * (x A^T) B^T for each layer that the adapter has, to be added to the adapter's
    rows.
    """

    rows: slice | Tensor
    """A slice, or int64 [n] row numbers."""
    scaling: float
    weights: Sequence[LoraWeights | None]
    """One entry for each layer; not all of them None."""
    names: Sequence[str] = ()
    """Names of the layers."""
    gradient: PassGradient | None = None
    """Receives the gradients, by the layers' names. If None, they are returned as tensors."""
    layers: Sequence[tuple[int, LoraWeights]] = field(init=False)
    """Number and weights of each layer that the adapter has."""

    def __post_init__(self) -> None:
        self.layers = [(n, weights) for n, weights in enumerate(self.weights) if weights is not None]

    @property
    def parameters(self) -> list[Tensor]:
        """Inputs for autograd: A and B of each layer in turn, or the anchor of `gradient` in place of them all."""
        if self.gradient is not None:
            return [self.gradient.anchor]
        return [tensor for _, weights in self.layers for tensor in (weights.a_R_I, weights.b_O_R)]

    def gradients(self, layer: int, grad_a_R_I: Tensor, grad_b_O_R: Tensor) -> tuple[Tensor, Tensor] | None:
        """Scales the gradients of a layer's A and B, which come unscaled. Returns them, or adds them to `gradient` and
        returns None."""
        if self.gradient is None:
            weights = cast(LoraWeights, self.weights[layer])
            grads = grad_a_R_I.mul_(self.scaling), grad_b_O_R.mul_(self.scaling)
            return grads[0].to(weights.a_R_I.dtype), grads[1].to(weights.b_O_R.dtype)
        there = self.gradient.of(self.names[layer])
        there.a_R_I.add_(grad_a_R_I, alpha=self.scaling)
        there.b_O_R.add_(grad_b_O_R, alpha=self.scaling)
        return None


def parameters_of(shares: Sequence[Share]) -> list[Tensor]:
    """The parameters of all shares, in the order in which `backward` returns their gradients."""
    return [tensor for share in shares for tensor in share.parameters]


def add_rows(out: Tensor, rows: slice | Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """out[rows] += alpha * left @ right, in place."""
    if isinstance(rows, slice):
        out[rows].addmm_(left, right, alpha=alpha)
    else:
        out.index_add_(0, rows, left @ right, alpha=alpha)


def blocks(shares: Sequence[Share], x_T_I: Tensor) -> Iterator[_Few | _Block]:
    """Groups the shares, in order, into units that are computed together."""
    first, num_rows = 0, x_T_I.shape[0]
    for n, share in enumerate(shares):
        if n + 1 < len(shares) and _is_followed(share, shares[n + 1]):
            continue
        rows = share.rows
        if isinstance(rows, slice):
            rows = slice(cast(slice, shares[first].rows).start, rows.stop)
            count = rows.stop - rows.start
            rows = None if count == num_rows else rows
            if first == n and count <= _FEW_ROWS and share.layers[0][1].a_R_I.dtype == x_T_I.dtype:
                yield _Few(share, rows)
                first = n + 1
                continue
        yield _Block(shares[first : n + 1], rows)
        first = n + 1


@dataclass(slots=True)
class _Few:
    """A share of few rows, computed in the dtype of its weights."""

    share: Share
    rows: slice | None
    """None means all rows."""

    def of(self, x_T_C: Tensor) -> Tensor:
        return x_T_C if self.rows is None else x_T_C[self.rows]

    def forward(self, x_T_I: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Adds the share to the outputs. Returns the tensors that `backward` takes as `lows`."""
        x_n_I, lows = self.of(x_T_I), []
        for n, weights in self.share.layers:
            low_n_R = torch.mm(x_n_I, weights.a_R_I.T)
            self.of(outputs[n]).addmm_(low_n_R, weights.b_O_R.T, alpha=self.share.scaling)
            lows.append(low_n_R)
        return lows

    def backward(
        self, x_T_I: Tensor, lows: Iterator[Tensor] | None, grads_T_O: Sequence[Tensor], grad_x_T_I: Tensor | None
    ) -> list[Tensor | None]:
        """Returns the gradients of the parameters, and adds the share's part to the gradient of x. If `lows` is None,
        the share was merged into the weights, and the gradient of x already contains its part."""
        share, x_n_I, out = self.share, self.of(x_T_I), []
        gradient, scaling = share.gradient, share.scaling
        for n, weights in share.layers:
            low_n_R = torch.mm(x_n_I, weights.a_R_I.T) if lows is None else next(lows)
            grad_n_O = self.of(grads_T_O[n])
            grad_low_n_R = torch.mm(grad_n_O, weights.b_O_R)
            if grad_x_T_I is not None and lows is not None:
                self.of(grad_x_T_I).addmm_(grad_low_n_R, weights.a_R_I, alpha=scaling)
            if gradient is None:
                out += [(grad_low_n_R.T @ x_n_I).mul_(scaling), (grad_n_O.T @ low_n_R).mul_(scaling)]
            else:
                there = gradient.of(share.names[n])
                there.a_R_I.addmm_(grad_low_n_R.T, x_n_I, alpha=scaling)
                there.b_O_R.addmm_(grad_n_O.T, low_n_R, alpha=scaling)
        return out if gradient is None else [None]


@dataclass(slots=True)
class _Block:
    """Consecutive shares with equal numbers of rows, equal ranks and the same layers, computed as one batched product.
    A single share is a block too, without the dimension G."""

    shares: Sequence[Share]
    rows: slice | Tensor | None
    """Rows of all the shares; None means all rows."""

    @property
    def scaling(self) -> float:
        return self.shares[0].scaling

    @property
    def layers(self) -> list[int]:
        return [n for n, _ in self.shares[0].layers]

    def forward(self, x_T_I: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
        """See _Few.forward."""
        low = _product(self.of(x_T_I), self._a(x_T_I.dtype).mT)
        for n, part, b in zip(self.layers, self._split(low), self._bs(x_T_I.dtype), strict=True):
            self._add(outputs[n], part, b.mT)
        return [low]

    def backward(
        self, x_T_I: Tensor, lows: Iterator[Tensor] | None, grads_T_O: Sequence[Tensor], grad_x_T_I: Tensor | None
    ) -> list[Tensor | None]:
        """See _Few.backward."""
        x, a = self.of(x_T_I), self._a(x_T_I.dtype)
        low = _product(x, a.mT) if lows is None else next(lows)
        grads = [self.of(grads_T_O[n]) for n in self.layers]
        parts = [_product(grad, b) for grad, b in zip(grads, self._bs(x_T_I.dtype), strict=True)]
        grad_low = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if grad_x_T_I is not None and lows is not None:
            self._add(grad_x_T_I, grad_low, a)
        # This product of a few long rows with the gradient is three times as fast as its transpose.
        grads_b_R_O = [_product(part.mT, grad) for part, grad in zip(self._split(low), grads, strict=True)]
        grad_a = _product(grad_low.mT, x)
        out: list[Tensor | None] = []
        for g, share in enumerate(self.shares):
            mine_a = grad_a if len(self.shares) == 1 else grad_a[g]
            mine_b = [one if len(self.shares) == 1 else one[g] for one in grads_b_R_O]
            for n, a_R_I, b_R_O in zip(self.layers, self._split(mine_a, 0), mine_b, strict=True):
                out += share.gradients(n, a_R_I, b_R_O.T) or ()
            out += [] if share.gradient is None else [None]
        return out

    def of(self, x_T_C: Tensor) -> Tensor:
        """The block's rows, [n, C] or [G, n, C]."""
        x = x_T_C if self.rows is None else x_T_C[self.rows]
        return x if len(self.shares) == 1 else x.unflatten(0, (len(self.shares), -1))

    def _a(self, dtype: torch.dtype) -> Tensor:
        """A of all layers, [S, I] or [G, S, I]."""
        matrices = [weights.a_R_I for share in self.shares for _, weights in share.layers]
        a = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        return (a if len(self.shares) == 1 else a.unflatten(0, (len(self.shares), -1))).to(dtype)

    def _bs(self, dtype: torch.dtype) -> list[Tensor]:
        """B of each layer, [O, R] or [G, O, R]."""
        if len(self.shares) == 1:
            return [weights.b_O_R.to(dtype) for _, weights in self.shares[0].layers]
        each = zip(*(share.layers for share in self.shares), strict=True)
        return [torch.stack([weights.b_O_R for _, weights in same]).to(dtype) for same in each]

    def _split(self, low: Tensor, dim: int = -1) -> Sequence[Tensor]:
        """Splits the ranks of all layers into those of each layer."""
        ranks = [weights.a_R_I.shape[0] for _, weights in self.shares[0].layers]
        return (low,) if len(ranks) == 1 else torch.split_with_sizes(low, ranks, dim)

    def _add(self, out_T_C: Tensor, left: Tensor, right: Tensor) -> None:
        """Adds scaling * left @ right to the block's rows, in place."""
        if isinstance(self.rows, Tensor):
            out_T_C.index_add_(0, self.rows, left @ right, alpha=self.scaling)
        elif len(self.shares) == 1:
            self.of(out_T_C).addmm_(left, right, alpha=self.scaling)
        else:
            self.of(out_T_C).baddbmm_(left, right, alpha=self.scaling)


def _is_followed(share: Share, after: Share) -> bool:
    """Whether `after` can be in one block with `share`."""
    if not isinstance(share.rows, slice) or not isinstance(after.rows, slice):
        return False
    adjoin = share.rows.stop == after.rows.start
    as_many = share.rows.stop - share.rows.start == after.rows.stop - after.rows.start
    return adjoin and as_many and share.scaling == after.scaling and _ranks(share) == _ranks(after)


def _ranks(share: Share) -> list[int]:
    """Rank of each layer; 0 if the adapter does not have the layer."""
    return [0 if weights is None else weights.a_R_I.shape[0] for weights in share.weights]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, for two or three dimensions, with less overhead than matmul."""
    return torch.mm(left, right) if left.ndim == 2 else torch.bmm(left, right)
