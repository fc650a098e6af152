"""Computes W + scaling B A as one matrix for the rows of a share, if that costs less than adding the share to them.

Shapes: T packed tokens, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from tinsmith.modeling.adapter import LoraWeights
from tinsmith.modeling.shares import Share


def worth_merging(x_T_I: Tensor, share: Share, outputs: Sequence[Tensor]) -> bool:
    """Whether computing W + scaling B A costs less than adding the share to its rows, forward and backward.

    Both are bound by memory on a CPU. Merging reads and writes W twice; adding reads and writes each row of the outputs
    and of the input's gradient once more. Half precision is never merged, because it would round a small share away.
    """
    if not isinstance(share.rows, slice) or x_T_I.is_cuda or x_T_I.dtype not in (torch.float32, torch.float64):
        return False
    num_rows, num_inputs = share.rows.stop - share.rows.start, x_T_I.shape[1]
    widths = [outputs[n].shape[1] for n, _ in share.layers]
    many = num_rows * sum(num_inputs + width for width in widths) > 2 * num_inputs * sum(widths)
    return many and all(weights.a_R_I.dtype == weights.b_O_R.dtype == x_T_I.dtype for _, weights in share.layers)


def segments(
    weights: Sequence[Tensor], shares: Sequence[Share], num_rows: int, widths: Sequence[int] | None
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Slices that cover all rows, in order, each with the weights for its rows: those of its share are merged in.

    widths: output features of the layers, if `weights` is one matrix of all layers. Merged matrices are made one after
    the other, and again in backward. Keeping them until backward would take as much memory as a model.
    """
    row = 0
    for share in sorted(shares, key=lambda share: cast(slice, share.rows).start):
        rows = cast(slice, share.rows)
        if rows.start > row:
            yield slice(row, rows.start), list(weights)
        if widths is None:
            yield (
                rows,
                [_merged(weight, mine, share.scaling) for weight, mine in zip(weights, share.weights, strict=True)],
            )
        else:
            whole = torch.empty_like(weights[0])
            parts = (torch.split_with_sizes(one, widths) for one in (weights[0], whole))
            for weight, mine, out in zip(next(parts), share.weights, next(parts), strict=True):
                _merged(weight, mine, share.scaling, out)
            yield rows, [whole]
        row = rows.stop
    if row < num_rows:
        yield slice(row, num_rows), list(weights)


def _merged(weight_O_I: Tensor, mine: LoraWeights | None, scaling: float, out_O_I: Tensor | None = None) -> Tensor:
    """W + scaling B A, in `out` if given. W itself if there is nothing to add and no `out`."""
    if mine is None:
        return weight_O_I if out_O_I is None else out_O_I.copy_(weight_O_I)
    out_I_O = None if out_O_I is None else out_O_I.T
    return torch.addmm(weight_O_I.T, mine.a_R_I.T, mine.b_O_R.T, alpha=scaling, out=out_I_O).T
