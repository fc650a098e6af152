"""Mixture-of-experts layers whose experts are one fused tensor, with the adapters of many runs.

transformers 5 keeps all experts of a layer in `gate_up_proj` (`up_proj` if they have no gate) and `down_proj`. They are
computed here as grouped matrix products over pairs of a row and one of its experts, sorted by expert. An adapter's
share is a low-rank grouped product over the pairs of the adapter's own rows. `gate_up_proj` has one A for all experts
and a B for each; `down_proj` has an A for each and one B for all.

Shapes: T packed tokens, K experts of a token, S = T K pairs, E experts, H hidden, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.modeling.adapter import Adapter, Target
from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.quantized import quantized_parameters, take_quantized

_ALIGNMENT_BYTES = 16
"""Alignment of each row in a grouped matrix product."""


class LoraExperts(nn.Module):
    """Frozen fused experts. Each active adapter's share is added to the adapter's rows."""

    def __init__(self, base: nn.Module, name: str, active: ActiveRuns) -> None:
        """Takes the parameters of `base`, for which `is_fused_experts` holds."""
        super().__init__()
        for key, parameter in list(base.named_parameters(recurse=False)):
            delattr(base, key)
            self.register_parameter(key, parameter)
        take_quantized(self, base)
        self.quantized: Mapping[str, Callable[[], Tensor]] = dict(quantized_parameters(base))
        """Computes each weight that is quantised (quantized.py), [E, M, N], by its name."""
        self.transposed: bool = base.is_transposed  # type: ignore[assignment]
        # _apply_gate is a method of the replaced module, which holds its activation and limits
        self.gate: Any = base._apply_gate if base.has_gate else base.act_fn
        self.up_name, down_name = _NAMES if base.has_gate else _UNGATED
        self.active = active
        up_O_I, down_O_I = (self._weight_E_O_I(key).shape for key in (self.up_name, down_name))
        self.num_experts = up_O_I[0]
        self.up = Target(
            f"{name}.{self.up_name}", "mlp", up_O_I[2], up_O_I[1],
            num_experts=self.num_experts, shared="A", peft_name=f"{name}.base_layer",
            tinker_name=f"{name}.w1", projections=("w1", "w3") if base.has_gate else ("w1",),
            interleaved=not base.is_concatenated,
        )  # fmt: skip
        self.down = Target(
            f"{name}.{down_name}", "mlp", down_O_I[2], down_O_I[1],
            num_experts=self.num_experts, shared="B", peft_name=name, tinker_name=f"{name}.w2", projections=("w2",),
        )  # fmt: skip

    def forward(self, x_T_H: Tensor, expert_T_K: Tensor, weight_T_K: Tensor) -> Tensor:
        """The layer's output [T, H]. Rows without a run get the base model's output. transformers prescribes the
        signature."""
        pairs = _Pairs.of(expert_T_K, self.num_experts)
        shares = _shares(self.active.runs, self.up.name, expert_T_K, pairs)
        up_S_O = self._product(pairs.spread(x_T_H), self.up_name, pairs)
        if shares:
            up_S_O = self._add_up(up_S_O, x_T_H, shares)
        hidden_S_I = self.gate(up_S_O)
        down_S_H = self._product(hidden_S_I, "down_proj", pairs)
        if shares:
            down_S_H = self._add_down(down_S_H, hidden_S_I, shares)
        y_T_K_H = pairs.restore(down_S_H)
        dtype = torch.promote_types(y_T_K_H.dtype, weight_T_K.dtype)
        return torch.bmm(weight_T_K[:, None].to(dtype), y_T_K_H.to(dtype))[:, 0].to(x_T_H.dtype)

    def _weight_E_O_I(self, key: str) -> Tensor:
        weight: Tensor = self.quantized[key]() if key in self.quantized else getattr(self, key)
        return weight.mT if self.transposed else weight

    def _product(self, x_S_I: Tensor, key: str, pairs: _Pairs) -> Tensor:
        if key in self.quantized:
            y_S_O = _QuantizedGroupedMM.apply(x_S_I, partial(self._weight_E_O_I, key), pairs.ends_E)
        else:
            y_S_O = grouped_mm(x_S_I, self._weight_E_O_I(key), pairs.ends_E)
        bias_E_O: Tensor | None = getattr(self, f"{key}_bias", None)
        return y_S_O if bias_E_O is None else y_S_O.add_(bias_E_O[pairs.expert_S])

    def _add_up(self, y_S_O: Tensor, x_T_H: Tensor, shares: Sequence[_Share]) -> Tensor:
        parts = []
        for share, x_n_H in zip(shares, _rows_of(x_T_H, [share.rows_n for share in shares]), strict=True):
            weights = share.adapter.weights[self.up.name]
            low_n_R = x_n_H @ (weights.a_R_I * share.adapter.scaling).to(x_n_H.dtype).T
            parts.append(grouped_mm(share.pairs.spread(low_n_R), weights.b_O_R.to(x_n_H.dtype), share.pairs.ends_E))
        return _add_rows(y_S_O, shares, parts)

    def _add_down(self, y_S_H: Tensor, x_S_I: Tensor, shares: Sequence[_Share]) -> Tensor:
        parts = []
        for share, x_s_I in zip(shares, _rows_of(x_S_I, [share.where_s for share in shares]), strict=True):
            weights = share.adapter.weights[self.down.name]
            low_s_R = grouped_mm(x_s_I, weights.a_R_I.to(x_s_I.dtype), share.pairs.ends_E)
            parts.append(low_s_R @ (weights.b_O_R * share.adapter.scaling).to(x_s_I.dtype).T)
        return _add_rows(y_S_H, shares, parts)


_NAMES = ("gate_up_proj", "down_proj")
_UNGATED = ("up_proj", "down_proj")


def is_fused_experts(module: nn.Module) -> bool:
    """Whether LoraExperts can replace this module: it has the form that transformers' experts interface prescribes."""
    if quantized_parameters(module):  # `quantizable` has asked for this module before
        return hasattr(module, "has_gate")
    gated = getattr(module, "has_gate", None)
    if (
        gated is None
        or not hasattr(module, "is_transposed")
        or not hasattr(module, "_apply_gate" if gated else "act_fn")
    ):
        return False
    tensors, names = dict(module.named_parameters(recurse=False)), _NAMES if gated else _UNGATED
    known = {name for name in tensors if name.removesuffix("_bias") in names}
    return (
        known == set(tensors)
        and [name for name in tensors if name in names] == list(names)  # PEFT nests its wrappers in this order
        and all(tensors[name].ndim == 3 and _is_aligned(tensors[name]) for name in names)
    )


def _is_aligned(weight_E_M_N: Tensor) -> bool:
    return all(size * weight_E_M_N.element_size() % _ALIGNMENT_BYTES == 0 for size in weight_E_M_N.shape[1:])


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The pairs of some rows and their experts, sorted by expert."""

    num_choices: int
    """Experts of each row (K)."""
    order_S: Tensor
    """Number of the pair at each position of the sorted order. Pairs are numbered row by row."""
    inverse_S: Tensor
    """Position of each pair in the sorted order."""
    expert_S: Tensor
    """Expert of the pair at each position."""
    ends_E: Tensor
    """int32: position after each expert's last pair."""

    @classmethod
    def of(cls, expert_n_K: Tensor, num_experts: int) -> _Pairs:
        expert_S, order_S = expert_n_K.flatten().sort(stable=True)
        inverse_S = torch.empty_like(order_S)
        inverse_S[order_S] = torch.arange(order_S.shape[0], device=order_S.device)
        # scatter_add_ in place of bincount, which would make the host wait for the device.
        counts_E = torch.zeros(num_experts, dtype=torch.int32, device=order_S.device)
        counts_E.scatter_add_(0, expert_S, torch.ones_like(expert_S, dtype=torch.int32))
        return cls(expert_n_K.shape[1], order_S, inverse_S, expert_S, counts_E.cumsum(0, dtype=torch.int32))

    def spread(self, x_n_C: Tensor) -> Tensor:
        """[S, C]: each row once for each of its experts, in the sorted order."""
        return _Take.apply(x_n_C, self.order_S // self.num_choices, self.inverse_S, self.num_choices)

    def restore(self, x_S_C: Tensor) -> Tensor:
        """Values [S, C] in the sorted order, put back into the order of the rows: [n, K, C]."""
        return _Take.apply(x_S_C, self.inverse_S, self.order_S, 1).unflatten(0, (-1, self.num_choices))


@dataclass(frozen=True, slots=True)
class _Share:
    """The rows and pairs to which one run adds its adapter's share. `rows_n` and `where_s` are None for a run of all
    rows."""

    adapter: Adapter
    pairs: _Pairs
    """Pairs of the run's rows only, sorted by expert."""
    rows_n: Tensor | None
    """The run's rows among all T."""
    where_s: Tensor | None
    """Positions of the run's pairs among all S."""


def _shares(runs: Sequence[Run], target: str, expert_T_K: Tensor, pairs: _Pairs) -> list[_Share]:
    adapted = [run for run in runs if target in run.adapter.weights]
    num_rows, num_choices = expert_T_K.shape
    if len(adapted) == 1 and adapted[0].rows == slice(0, num_rows):
        return [_Share(adapted[0].adapter, pairs, None, None)]
    place_T_K = pairs.inverse_S.view(num_rows, num_choices)
    shares = []
    for run in adapted:
        rows_n = run.rows
        if isinstance(rows_n, slice):
            rows_n = torch.arange(rows_n.start, rows_n.stop, device=expert_T_K.device)
        own = _Pairs.of(expert_T_K[rows_n], pairs.ends_E.shape[0])
        shares.append(_Share(run.adapter, own, rows_n, place_T_K[rows_n].flatten()[own.order_S]))
    return shares


def _rows_of(x: Tensor, numbers: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """The rows of x for each share, [n, ...] each, taken by one gather. With one gather for each share, the backward
    pass would make a tensor of the size of x for each share. `numbers`: row numbers; None for all rows, which occurs
    only with a single share."""
    given = [rows for rows in numbers if rows is not None]
    if not given:
        return [x]
    return x.index_select(0, torch.cat(given)).split([rows.shape[0] for rows in given])


def _add_rows(y_S_O: Tensor, shares: Sequence[_Share], parts: Sequence[Tensor]) -> Tensor:
    where = [share.where_s for share in shares if share.where_s is not None]
    if not where:
        return y_S_O.add_(parts[0])
    return y_S_O.index_add_(0, torch.cat(where), torch.cat(list(parts)))


class _Take(torch.autograd.Function):
    """Takes each row of x `times` times. `inverse` holds the positions of these copies, so the gradient is a plain sum
    over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, inverse: Tensor, times: int) -> Tensor:
        ctx.inverse, ctx.times = inverse, times
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad_outputs[0].index_select(0, ctx.inverse)
        return (grad if ctx.times == 1 else grad.unflatten(0, (-1, ctx.times)).sum(1)), None, None, None


def grouped_mm(x_S_I: Tensor, weight_E_O_I: Tensor, ends_E: Tensor) -> Tensor:
    """x W_e^T, [S, O], where e is the group of each row. Group e consists of the rows from ends[e - 1] to ends[e]."""
    return _GroupedMM.apply(x_S_I, weight_E_O_I, ends_E)


class _GroupedMM(torch.autograd.Function):
    """`grouped_mm`, differentiated by hand: a frozen weight saves no rows for backward, and padding allows adapters of
    every rank."""

    @staticmethod
    def forward(ctx: Any, x_S_I: Tensor, weight_E_O_I: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_S_I if ctx.needs_input_grad[1] else None, weight_E_O_I, ends_E)
        return _grouped(x_S_I, weight_E_O_I.mT, ends_E)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_S_I, weight_E_O_I, ends_E = ctx.saved_tensors
        grad_S_O = grad_outputs[0].contiguous()
        grad_x = _grouped(grad_S_O, weight_E_O_I, ends_E) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if x_S_I is not None:
            grad_weight = _grouped_outer(grad_S_O, x_S_I, ends_E)
        return grad_x, grad_weight, None


class _QuantizedGroupedMM(torch.autograd.Function):
    """`grouped_mm` with a frozen weight that is dequantised again for each product, so that nothing of it is kept for
    backward."""

    @staticmethod
    def forward(ctx: Any, x_S_I: Tensor, weight_E_O_I: Callable[[], Tensor], ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        ctx.weight_E_O_I = weight_E_O_I
        return _grouped(x_S_I, weight_E_O_I().mT, ends_E)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (ends_E,) = ctx.saved_tensors
        return _grouped(grad_outputs[0].contiguous(), ctx.weight_E_O_I(), ends_E), None, None


def _grouped(x_S_I: Tensor, weight_E_I_O: Tensor, ends_E: Tensor) -> Tensor:
    """x W_e of each row, [S, O]. Pads features to the alignment that the kernel needs."""
    num_inputs, num_outputs = weight_E_I_O.shape[1:]
    pad_I, pad_O = (_padding(size, x_S_I) for size in (num_inputs, num_outputs))
    if pad_I:
        x_S_I = nn.functional.pad(x_S_I, (0, pad_I))
    if pad_I or pad_O:
        weight_E_I_O = nn.functional.pad(weight_E_I_O, (0, pad_O, 0, pad_I))
    elif weight_E_I_O.data_ptr() % _ALIGNMENT_BYTES:  # a view of an adapter's buffer can begin at any element
        weight_E_I_O = weight_E_I_O.clone()
    y_S_O = nn.functional.grouped_mm(x_S_I.contiguous(), weight_E_I_O, offs=ends_E)
    return y_S_O[:, :num_outputs].contiguous() if pad_O else y_S_O


def _grouped_outer(grad_S_O: Tensor, x_S_I: Tensor, ends_E: Tensor) -> Tensor:
    """grad^T x of each group, [E, O, I]."""
    num_outputs, num_inputs = grad_S_O.shape[1], x_S_I.shape[1]
    grad_S_O = nn.functional.pad(grad_S_O, (0, _padding(num_outputs, grad_S_O)))
    x_S_I = nn.functional.pad(x_S_I, (0, _padding(num_inputs, x_S_I)))
    outer = nn.functional.grouped_mm(grad_S_O.mT, x_S_I, offs=ends_E)[:, :num_outputs, :num_inputs]
    empty_E = ends_E == torch.cat([ends_E.new_zeros(1), ends_E[:-1]])
    return outer.masked_fill(empty_E[:, None, None], 0.0)  # the kernel may leave an empty group's product unwritten


def _padding(size: int, like: Tensor) -> int:
    return -size % (_ALIGNMENT_BYTES // like.element_size())
