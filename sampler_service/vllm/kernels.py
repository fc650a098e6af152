"""LoRA on the CPU, in place of vLLM's own kernels there, which are wrong and slow: they index the slots with -1, so
that rows without an adapter get the last slot's, and they copy A and B once for each row.

Shapes: n rows, S slots, I in, O out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SlotKernels:
    """Rows are grouped by slot, and each group is one matrix product, of the adapter's own rank."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}
        """Rank of the adapter in each slot. A slot has the largest rank, and zeros beyond the adapter's own."""

    def install(self, module: Any) -> None:
        """Replaces the kernels that vLLM's CPU wrapper has imported."""

        def each(slots: Tensor, lengths: Tensor) -> Tensor:
            return torch.repeat_interleave(slots, lengths)

        module.bgmv_shrink = lambda x, w, y, slots, scale=1.0: self.shrink(x, w, y, slots, scale)
        module.bgmv_expand = lambda x, w, y, slots, add_inputs=True: self.expand(x, w, y, slots, add=add_inputs)
        module.bgmv_expand_slice = lambda x, w, y, slots, start, size, add_inputs=True: self.expand(
            x, w, y[:, start : start + size], slots, add=add_inputs
        )
        module.sgmv_shrink = lambda x, w, y, starts, lengths, slots, b, m, t, scale: self.shrink(
            x, w, y, each(slots, lengths), scale
        )
        module.sgmv_expand = lambda x, w, y, starts, lengths, slots, b, m, t, add_inputs=False: self.expand(
            x, w, y, each(slots, lengths), add=add_inputs
        )
        module.sgmv_expand_slice = lambda x, w, y, starts, lengths, slots, b, m, t, start, size, add_inputs=False: (
            self.expand(x, w, y[:, start : start + size], each(slots, lengths), add=add_inputs)
        )

    def shrink(self, x_n_I: Tensor, a_S_R_I: Tensor, y_n_R: Tensor, slots_n: Tensor, scale: float) -> None:
        """y = scale * x A^T of each row's slot; 0 for a row without one (-1)."""
        y_n_R.zero_()
        for slot, rows in _groups(slots_n, x_n_I.shape[0]):
            a_R_I = _slot(a_S_R_I, slot)[: self._rank(slot, y_n_R.shape[1])]
            y_n_R[rows, : a_R_I.shape[0]] = (x_n_I[rows].to(y_n_R.dtype) @ a_R_I.to(y_n_R.dtype).T) * scale

    def expand(self, x_n_R: Tensor, b_S_O_R: Tensor, y_n_O: Tensor, slots_n: Tensor, *, add: bool) -> None:
        """y (+)= x B^T of each row's slot. A row without one (-1) keeps its y, or gets 0 when nothing is added."""
        if not add:
            y_n_O.zero_()
        for slot, rows in _groups(slots_n, x_n_R.shape[0]):
            rank = self._rank(slot, x_n_R.shape[1])
            b_O_R = _slot(b_S_O_R, slot)
            columns = min(b_O_R.shape[0], y_n_O.shape[1])  # either may be padded
            product = x_n_R[rows, :rank].to(y_n_O.dtype) @ b_O_R[:columns, :rank].to(y_n_O.dtype).T
            y_n_O[rows, :columns] += product

    def _rank(self, slot: int, largest: int) -> int:
        return min(self.ranks.get(slot, largest), largest)


def _slot(weights: Tensor, slot: int) -> Tensor:
    one = weights[slot]
    return one[0] if one.dim() == 3 else one


def _groups(slots_n: Tensor, num_rows: int) -> list[tuple[int, slice | Tensor]]:
    """(slot, its rows) of the rows that have one."""
    if slots_n.shape[0] != num_rows:
        raise ValueError(f"{num_rows} rows, and adapters of {slots_n.shape[0]}")
    found = torch.unique(slots_n).tolist()
    if len(found) == 1:
        return [(found[0], slice(None))] if found[0] >= 0 else []
    return [(slot, (slots_n == slot).nonzero()[:, 0]) for slot in found if slot >= 0]
