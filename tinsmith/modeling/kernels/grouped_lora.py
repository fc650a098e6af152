"""The LoRA shares of many tenants by grouped matrix products: a few kernels for each layer, for any number of tenants.

Rows are sorted by adapter, so each tenant is a group of rows. A and B of all tenants are stacked, cast to the rows'
dtype and padded with zeros to a common rank; the padding adds nothing. The stacks exist during one layer's forward, and
are made again in its backward. Making them costs little beside the products. Stacks that are kept until backward would
take half the memory of the tenants' weights.

Shapes: G groups, T packed tokens, I input features, O output features, R common rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinsmith.modeling.kernels.transfer import table

if TYPE_CHECKING:
    from tinsmith.modeling.adapter import Adapter
    from tinsmith.modeling.lora import Run

RANK_MULTIPLE = 16
"""Ranks are padded to a multiple of this, because the kernels read 16 bytes at a time."""
FEATURE_MULTIPLE = 8
"""Grouped products support layers whose features are a multiple of this: 16 bytes in bfloat16."""
MAX_GROUPS = 1023
"""Largest number of groups that torch's kernel supports."""

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(left, right, ends_G): [T, K] by [G, K, N] -> [T, N], row groups end at ends_G; [M, T] by [T, N] -> [G, M, N]."""


def torch_grouped_mm(left: Tensor, right: Tensor, ends_G: Tensor) -> Tensor:
    return torch.nn.functional.grouped_mm(left, right, offs=ends_G)


@dataclass(frozen=True, slots=True)
class Groups:
    """The tenants of one packed batch. Made once for each forward pass."""

    adapters: Sequence[Adapter | None]
    """Adapter of each group; None for rows without an adapter."""
    ends_G: Tensor
    """int32, on the device: the row after each group's last."""
    scalings_G: Tensor
    """float32, on the device: scaling of each group's adapter."""
    mm: GroupedMM

    @classmethod
    def of(cls, runs: Sequence[Run], num_rows: int, device: torch.device, mm: GroupedMM) -> Groups | None:
        """The groups of these runs. None if grouped products do not pay or are not possible: fewer than two tenants,
        rows that are numbers or out of order, or too many groups."""
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

    def linear(self, x_T_I: Tensor, weight_O_I: Tensor, bias_O: Tensor | None, name: str) -> Tensor | None:
        """x W^T + bias + scaling (x A^T) B^T, with the A and B of each row's tenant. Differentiable in x, A and B.

        None if no tenant adapts this layer, or if grouped products do not support its features.
        """
        layer = _Layer.of(self, name, weight_O_I)
        if not layer.parameters or weight_O_I.shape[0] % FEATURE_MULTIPLE or weight_O_I.shape[1] % FEATURE_MULTIPLE:
            return None
        return _GroupedLinear.apply(x_T_I.contiguous(), weight_O_I, bias_O, layer, *layer.parameters)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's part of the tenants."""

    groups: Groups
    where: Sequence[int]
    """The groups whose adapter has this layer."""
    parameters: Sequence[Tensor]
    """A and B of each of these groups in turn."""
    rank: int
    """The common rank, to which all are padded."""
    dtype: torch.dtype

    @classmethod
    def of(cls, groups: Groups, name: str, like: Tensor) -> _Layer:
        where: list[int] = []
        parameters: list[Tensor] = []
        for n, adapter in enumerate(groups.adapters):
            weights = adapter.weights.get(name) if adapter is not None else None
            if weights is not None:
                where.append(n)
                parameters += [weights.a_R_I, weights.b_O_R]
        largest = max((a.shape[0] for a in parameters[::2]), default=1)
        return cls(groups, where, parameters, -(-largest // RANK_MULTIPLE) * RANK_MULTIPLE, like.dtype)

    @property
    def ranks(self) -> list[int]:
        return [a.shape[0] for a in self.parameters[::2]]

    def stack_a(self, parameters: Sequence[Tensor]) -> Tensor:
        """A of all groups, [G, R, I]."""
        a_G_R_I = self._zeros(self.rank, parameters[0].shape[1], parameters[0].device)
        rows = [a_G_R_I[n, : a.shape[0]] for n, a in zip(self.where, parameters[::2], strict=True)]
        torch._foreach_copy_(rows, list(parameters[::2]))
        return a_G_R_I

    def stack_b(self, parameters: Sequence[Tensor]) -> Tensor:
        """B of all groups, [G, O, R], multiplied by each tenant's scaling."""
        b_G_O_R = self._zeros(parameters[1].shape[0], self.rank, parameters[1].device)
        columns = [b_G_O_R[n, :, : b.shape[1]] for n, b in zip(self.where, parameters[1::2], strict=True)]
        scalings = [adapter.scaling for n in self.where if (adapter := self.groups.adapters[n]) is not None]
        torch._foreach_copy_(columns, torch._foreach_mul(list(parameters[1::2]), scalings))
        return b_G_O_R

    def _zeros(self, rows: int, columns: int, device: torch.device) -> Tensor:
        full = len(self.where) == len(self.groups.adapters) and all(rank == self.rank for rank in self.ranks)
        make = torch.empty if full else torch.zeros
        return make(len(self.groups.adapters), rows, columns, dtype=self.dtype, device=device)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_T_I: Tensor, weight_O_I: Tensor, bias_O: Tensor | None, layer: _Layer, *parameters: Tensor
    ) -> Tensor:
        mm, ends_G = layer.groups.mm, layer.groups.ends_G
        y_T_O = torch.nn.functional.linear(x_T_I, weight_O_I, bias_O)
        low_T_R = mm(x_T_I, layer.stack_a(parameters).transpose(1, 2), ends_G)
        y_T_O += mm(low_T_R, layer.stack_b(parameters).transpose(1, 2), ends_G)
        ctx.save_for_backward(x_T_I, weight_O_I, low_T_R, *parameters)
        ctx.layer = layer
        return y_T_O

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_T_O = grad_outputs[0].contiguous()
        layer: _Layer = ctx.layer
        mm, ends_G = layer.groups.mm, layer.groups.ends_G
        x_T_I, weight_O_I, low_T_R, *parameters = ctx.saved_tensors
        grad_low_T_R = mm(grad_T_O, layer.stack_b(parameters), ends_G)
        grad_x_T_I = None
        if ctx.needs_input_grad[0]:
            grad_x_T_I = grad_T_O @ weight_O_I
            grad_x_T_I += mm(grad_low_T_R, layer.stack_a(parameters), ends_G)
        grads: list[Tensor | None] = [None] * len(parameters)
        if any(ctx.needs_input_grad[4:]):
            # One cast for all tenants, who get views of the result.
            grad_a_G_R_I = mm(grad_low_T_R.T, x_T_I, ends_G).float()
            grad_b_G_O_R = mm(grad_T_O.T, low_T_R, ends_G).float()
            grad_b_G_O_R *= layer.groups.scalings_G[:, None, None]
            for n, (group, rank) in enumerate(zip(layer.where, layer.ranks, strict=True)):
                grads[2 * n] = grad_a_G_R_I[group, :rank]
                grads[2 * n + 1] = grad_b_G_O_R[group, :, :rank]
        return grad_x_T_I, None, None, None, *grads
