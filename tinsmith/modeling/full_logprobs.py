"""Log-probabilities of named tokens in full-parameter training. In contrast to logprobs.py, there are no adapters, and
the output layer's own weight has a gradient. The logits [T, V] never exist as a whole.

Shapes: T packed tokens, V vocabulary, H hidden, M named tokens (several may share a row), n rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tinsmith.modeling.logprobs import Head


def full_target_logprobs(head: Head, hidden_T_H: Tensor, rows_M: Tensor, tokens_M: Tensor) -> Tensor:
    """log P(tokens_M[m] | row rows_M[m]) for each m, float32 [M]. Differentiable in the hidden states, the weight and
    the bias of the output layer.

    `rows_M`: int64, in ascending order, with repeats.
    """
    return _FullLogprobs.apply(hidden_T_H, head.weight_V_H, head.bias_V, rows_M, tokens_M, head)


class _FullLogprobs(torch.autograd.Function):
    """Forward saves one log-sum-exp for each row. Backward computes the logits of each chunk again, only for rows that
    have a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_T_H: Tensor,
        weight_V_H: Tensor,
        bias_V: Tensor | None,
        rows_M: Tensor,
        tokens_M: Tensor,
        head: Head,
    ) -> Tensor:
        lse_T = torch.empty(hidden_T_H.shape[0], device=hidden_T_H.device)
        picked_M = torch.empty(rows_M.shape[0], device=hidden_T_H.device)
        for rows, named in _chunks(head, hidden_T_H.shape[0], rows_M):
            logits_n_V = _logits(head, hidden_T_H[rows], weight_V_H, bias_V)
            lse_T[rows] = logits_n_V.logsumexp(-1)
            picked_M[named] = logits_n_V[rows_M[named] - rows.start, tokens_M[named]]
        ctx.save_for_backward(hidden_T_H, weight_V_H, bias_V, rows_M, tokens_M, lse_T)
        ctx.head = head
        return picked_M - lse_T[rows_M]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_M,) = grad_outputs
        hidden_T_H, weight_V_H, bias_V, rows_M, tokens_M, lse_T = ctx.saved_tensors
        head, dtype = ctx.head, weight_V_H.dtype
        grad_hidden_T_H = torch.zeros_like(hidden_T_H)
        grad_weight_V_H = torch.zeros_like(weight_V_H, dtype=torch.float32)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for _, named in _chunks(head, hidden_T_H.shape[0], rows_M):
            wanted = grad_M[named] != 0
            grad_m = grad_M[named][wanted]
            if grad_m.numel() == 0:
                continue
            active_n, local_m = rows_M[named][wanted].unique_consecutive(return_inverse=True)
            hidden_n_H = hidden_T_H[active_n]
            logits_n_V = _logits(head, hidden_n_H, weight_V_H, bias_V)
            slope_n_V = None if head.softcap is None else 1 - (logits_n_V / head.softcap).square()
            # d(picked - lse)/d(logits) = onehot - softmax
            total_n = torch.zeros(active_n.shape[0], device=grad_m.device).index_add_(0, local_m, grad_m)
            grad_n_V = logits_n_V.sub_(lse_T[active_n, None]).exp_().mul_(-total_n[:, None])
            grad_n_V.index_put_((local_m, tokens_M[named][wanted]), grad_m, accumulate=True)
            if slope_n_V is not None:
                grad_n_V.mul_(slope_n_V)
            if head.scale != 1.0:
                grad_n_V.mul_(head.scale)
            if grad_bias_V is not None:
                grad_bias_V += grad_n_V.sum(0)
            grad_n_V = grad_n_V.to(dtype)
            grad_hidden_T_H[active_n] = grad_n_V @ weight_V_H
            if dtype == torch.float32:
                grad_weight_V_H.addmm_(grad_n_V.T, hidden_n_H)
            else:  # the products are in the model's type, their sum over the chunks is in float32
                grad_weight_V_H += grad_n_V.T @ hidden_n_H
        bias = None if grad_bias_V is None else grad_bias_V.to(dtype)
        return grad_hidden_T_H, grad_weight_V_H.to(dtype), bias, None, None, None


def _chunks(head: Head, num_rows: int, rows_M: Tensor) -> Iterator[tuple[slice, slice]]:
    """Chunks of at most head.max_rows rows, each with the slice of M whose tokens lie in these rows."""
    rows = [slice(first, min(first + head.max_rows, num_rows)) for first in range(0, num_rows, head.max_rows)]
    stops = torch.searchsorted(rows_M, torch.tensor([part.stop for part in rows], device=rows_M.device)).tolist()
    return zip(rows, (slice(*pair) for pair in zip([0, *stops], stops, strict=False)), strict=True)


def _logits(head: Head, hidden_n_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None) -> Tensor:
    """The logits of some rows, with scale and softcap applied: float32 [n, V]."""
    logits_n_V = torch.nn.functional.linear(hidden_n_H, weight_V_H, bias_V).float()
    if head.scale != 1.0:
        logits_n_V.mul_(head.scale)
    if head.softcap is not None:
        logits_n_V.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits_n_V
