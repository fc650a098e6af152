"""The LoRA product of lora.py for all adapters at once, with grouped matrix products: a few kernels for each layer.

Shapes: T packed tokens, I input features, O output features, R the common rank, G groups of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.kernels.transfer import table
from tinsmith.modeling.lora import LoraLinear

RANK_MULTIPLE = 16
"""Ranks are padded to a multiple of this, because the kernels read 16 bytes at a time."""
FEATURE_MULTIPLE = 8
"""Grouped products support layers whose features are a multiple of this: 16 bytes in bfloat16."""
MAX_GROUPS = 1023
"""Largest number of groups that torch's kernel supports."""

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(left, right, ends_G): [T, K] by [G, K, N] -> [T, N], row groups end at ends_G; [M, T] by [T, N] -> [G, M, N]."""


def torch_grouped_mm(left: Tensor, right: Tensor, ends_G: Tensor) -> Tensor:
    """torch's kernel as a GroupedMM."""
    return torch.nn.functional.grouped_mm(left, right, offs=ends_G)


@dataclass(frozen=True, slots=True)
class Groups:
    """The runs of one packed batch for grouped matrix products. Made once for each forward pass.

    Rows are sorted by adapter, so each adapter has a group of rows. A and B of all adapters are stacked, cast to the
    rows' dtype and padded with zeros to a common rank; the padding adds nothing. The stacks exist during one layer's
    forward, and are made again in its backward. Making them costs little beside the products. Stacks that are kept
    until backward would take half the memory of the adapters.
    """

    adapters: Sequence[Adapter | None]
    """Adapter of each group; None for rows without an adapter."""
    ends_G: Tensor
    """int32, on the device: the row after each group's last."""
    scalings_G: Tensor
    """float32, on the device: scaling of each group's adapter."""
    mm: GroupedMM

    @classmethod
    def of(cls, runs: Sequence[Run], num_rows: int, device: torch.device, mm: GroupedMM) -> Groups | None:
        """The groups of these runs. None if grouped products do not pay or are not possible: for fewer than two runs,
        for runs whose rows are not slices in rising order, and for more than MAX_GROUPS groups."""
        if len(runs) < 2:
            return None
        adapters: list[Adapter | None] = []
        ends: list[int] = []
        row = 0
        for run in runs:
            if not isinstance(run.rows, slice) or run.rows.start < row:
                return None
            if run.rows.start > row:
                adapters.append(None)
                ends.append(run.rows.start)
            adapters.append(run.adapter)
            ends.append(run.rows.stop)
            row = run.rows.stop
        if row < num_rows:
            adapters.append(None)
            ends.append(num_rows)
        if len(ends) > MAX_GROUPS:
            return None
        scalings = [adapter.scaling if adapter is not None else 0.0 for adapter in adapters]
        return cls(adapters, table(ends, torch.int32, device), table(scalings, torch.float32, device), mm)

    def linear(self, x_T_I: Tensor, layer: LoraLinear) -> Tensor | None:
        """x W^T + bias + scaling (x A^T) B^T, with the A and B of each row's adapter. Differentiable in x, A and B.

        None if no adapter has this layer, or if grouped products do not support its features.
        """
        grouped = _GroupedLayer.of(self, layer)
        if not grouped.parameters or x_T_I.shape[1] % FEATURE_MULTIPLE or layer.num_outputs % FEATURE_MULTIPLE:
            return None
        return _GroupedLinear.apply(x_T_I.contiguous(), layer, grouped, *grouped.parameters)


@dataclass(frozen=True, slots=True)
class _GroupedLayer:
    """One layer's part of the adapters."""

    groups: Groups
    where: Sequence[int]
    """The groups whose adapter has this layer."""
    parameters: Sequence[Tensor]
    """A and B of each of these groups in turn."""
    rank: int
    """The common rank R, to which A and B of all adapters are padded."""
    dtype: torch.dtype

    @classmethod
    def of(cls, groups: Groups, layer: LoraLinear) -> _GroupedLayer:
        where: list[int] = []
        parameters: list[Tensor] = []
        for n, adapter in enumerate(groups.adapters):
            weights = adapter.weights.get(layer.name) if adapter is not None else None
            if weights is not None:
                where.append(n)
                parameters += [weights.a_R_I, weights.b_O_R]
        largest = max((a.shape[0] for a in parameters[::2]), default=1)
        return cls(groups, where, parameters, -(-largest // RANK_MULTIPLE) * RANK_MULTIPLE, layer.dtype)

    @property
    def ranks(self) -> list[int]:
        return [a.shape[0] for a in self.parameters[::2]]

    def stack_a(self, parameters: Sequence[Tensor]) -> Tensor:
        """A of all groups, [G, R, I]."""
        if self.is_full:
            return torch.stack(list(parameters[::2])).to(self.dtype)
        a_G_R_I = self._zeros(self.rank, parameters[0].shape[1], parameters[0].device)
        torch._foreach_copy_(self.parts(a_G_R_I, 0), list(parameters[::2]))
        return a_G_R_I

    def stack_b(self, parameters: Sequence[Tensor]) -> Tensor:
        """B of all groups, [G, O, R], multiplied by each adapter's scaling."""
        scalings = [adapter.scaling for n in self.where if (adapter := self.groups.adapters[n]) is not None]
        if self.is_full:
            b_G_O_R = torch.stack(list(parameters[1::2]))
            if set(scalings) != {1.0}:
                b_G_O_R *= self.groups.scalings_G[:, None, None]
            return b_G_O_R.to(self.dtype)
        b_G_O_R = self._zeros(parameters[1].shape[0], self.rank, parameters[1].device)
        torch._foreach_copy_(self.parts(b_G_O_R, 1), torch._foreach_mul(list(parameters[1::2]), scalings))
        return b_G_O_R

    @property
    def is_full(self) -> bool:
        """Whether every group has an adapter with this layer, of the common rank: the stacks then need no padding."""
        return len(self.where) == len(self.groups.adapters) and all(rank == self.rank for rank in self.ranks)

    def parts(self, stack_G: Tensor, dimension: int) -> list[Tensor]:
        """Views of a stack, one for each adapter with this layer: the first rows (dimension 0) or columns (dimension 1)
        of the adapter's group, as many as the adapter's rank."""
        groups = stack_G.unbind()  # one operation, which is enough for adapters of the common rank
        return [
            groups[n] if rank == self.rank else groups[n].narrow(dimension, 0, rank)
            for n, rank in zip(self.where, self.ranks, strict=True)
        ]

    def _zeros(self, rows: int, columns: int, device: torch.device) -> Tensor:
        return torch.zeros(len(self.groups.adapters), rows, columns, dtype=self.dtype, device=device)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T_I: Tensor, linear: LoraLinear, layer: _GroupedLayer, *parameters: Tensor) -> Tensor:
        mm, ends_G = layer.groups.mm, layer.groups.ends_G
        y_T_O = torch.nn.functional.linear(x_T_I, linear.dense(), linear.bias)
        low_T_R = mm(x_T_I, layer.stack_a(parameters).transpose(1, 2), ends_G)
        y_T_O += mm(low_T_R, layer.stack_b(parameters).transpose(1, 2), ends_G)
        ctx.save_for_backward(x_T_I, low_T_R, *parameters)
        ctx.linear, ctx.layer = linear, layer
        return y_T_O

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_T_O = grad_outputs[0].contiguous()
        layer: _GroupedLayer = ctx.layer
        mm, ends_G = layer.groups.mm, layer.groups.ends_G
        x_T_I, low_T_R, *parameters = ctx.saved_tensors
        grad_low_T_R = mm(grad_T_O, layer.stack_b(parameters), ends_G)
        grad_x_T_I = None
        if ctx.needs_input_grad[0]:
            grad_x_T_I = grad_T_O @ ctx.linear.dense()
            grad_x_T_I += mm(grad_low_T_R, layer.stack_a(parameters), ends_G)
        grads: list[Tensor | None] = [None] * len(parameters)
        if any(ctx.needs_input_grad[3:]):
            # One cast for all adapters, whose gradients are views of the result.
            grad_a_G_R_I = mm(grad_low_T_R.T, x_T_I, ends_G).float()
            grad_b_G_O_R = mm(grad_T_O.T, low_T_R, ends_G).float()
            grad_b_G_O_R *= layer.groups.scalings_G[:, None, None]
            grads[::2] = layer.parts(grad_a_G_R_I, 0)
            grads[1::2] = layer.parts(grad_b_G_O_R, 1)
        return grad_x_T_I, None, None, *grads
