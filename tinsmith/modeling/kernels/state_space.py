"""The scan of Mamba2 layers over packed sequences, chunk by chunk.

For each head, with inputs x_t, step sizes d_t, a rate A < 0, and b_t and c_t that the heads of a group share, the state
S [K, V] starts at zero in each sequence:

    S_t = exp(A d_t) S_(t-1) + b_t (d_t x_t)^T,    y_t = S_t^T c_t + D x_t

(Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 6, the block decomposition of SSD). Within a chunk, let
s_i be the sum of A d up to token i, L_ij = exp(s_i - s_j) for j <= i, v = d x, and s_C the sum of the whole chunk:

    y = (e^s c) S + (tril(c b^T) * L) v + D x
    S' = e^(s_C) S + b^T (e^(s_C - s) v)

Shapes: T packed tokens, G groups, R heads of a group, H = G R heads, V features of a head, K state features, N chunks,
C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tinsmith.modeling.kernels.chunks import Chunks, chunks_of
from tinsmith.modeling.kernels.delta_rule import decay_of, rows_less_columns

_CHUNK = 64
"""Tokens of a chunk."""


def state_space_scan(
    x_T_H_V: Tensor,
    step_T_H: Tensor,
    rate_H: Tensor,
    b_T_G_K: Tensor,
    c_T_G_K: Tensor,
    skip_H: Tensor | None,
    lengths: Sequence[int],
) -> Tensor:
    """The outputs y, [T, H, V], in float32, or in float64 for float64 inputs. `step_T_H`: d. `rate_H`: A. `skip_H`: D;
    None for a layer without it."""
    dtype = torch.float64 if x_T_H_V.dtype == torch.float64 else torch.float32
    step_T_H = step_T_H.to(dtype)
    inputs = (x_T_H_V.to(dtype), step_T_H, step_T_H * rate_H.to(dtype), b_T_G_K.to(dtype), c_T_G_K.to(dtype))
    skip_H = None if skip_H is None else skip_H.to(dtype)
    return _Scan.apply(*inputs, skip_H, chunks_of(tuple(lengths), _CHUNK))


class _Scan(torch.autograd.Function):
    """Differentiated by hand, for the reasons of delta_rule.py."""

    @staticmethod
    def forward(
        ctx: Any, x_T: Tensor, step_T: Tensor, decay_T: Tensor, b_T: Tensor, c_T: Tensor, skip_H: Tensor | None,
        chunks: Chunks,
    ) -> Tensor:  # fmt: skip
        groups = b_T.shape[1]
        x = _by_group(chunks, x_T, groups)  # [N, G, C, R, V]
        step, sums = (_by_group(chunks, one.unsqueeze(-1), groups) for one in (step_T, decay_T))  # [N, G, C, R, 1]
        b, c = (_by_group(chunks, one, groups).squeeze(3) for one in (b_T, c_T))  # [N, G, C, K]
        sums = sums.cumsum(2)
        v = x * step
        score = (c @ b.mT).unsqueeze(2) * decay_of(sums.transpose(2, 3))  # [N, G, R, C, C]
        out = (score @ v.transpose(2, 3)).transpose(2, 3)
        v *= (sums[:, :, -1:] - sums).exp()
        states = _states(b.mT @ v.flatten(3), sums[:, :, -1].exp(), chunks)
        out = (c @ states).unflatten(-1, x.shape[3:]).mul_(sums.exp()).add_(out)
        if skip_H is not None:
            out.addcmul_(x, skip_H.view(groups, 1, -1, 1))
        ctx.chunks = chunks
        ctx.save_for_backward(x, step, sums, b, c, skip_H, states)
        return _by_token(chunks, out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, step, sums, b, c, skip_H, states = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        grad = _by_group(chunks, grad_outputs[0], b.shape[1])
        grown, left, last = sums.exp(), (sums[:, :, -1:] - sums).exp(), sums[:, :, -1].exp()
        v = x * step
        v_left = v * left

        # Through the state
        grad_grown = grad * grown
        reading = (c @ states).unflatten(-1, x.shape[3:])
        grad_sums = torch.linalg.vecdot(grad_grown, reading).unsqueeze(-1)
        grad_c = grad_grown.flatten(3) @ states.mT
        grad_added, grad_last = _states_backward(c.mT @ grad_grown.flatten(3), states, last, chunks)
        grad_v = (b @ grad_added).unflatten(-1, x.shape[3:])
        grad_b = v_left.flatten(3) @ grad_added.mT
        along = torch.linalg.vecdot(grad_v, v_left).unsqueeze(-1)
        grad_sums -= along
        grad_sums[:, :, -1] += along.sum(2) + grad_last * last
        grad_v *= left
        # Within the chunk
        by_head = grad.transpose(2, 3).contiguous()
        decay = decay_of(sums.transpose(2, 3))
        plain = (c @ b.mT).unsqueeze(2)
        grad_score = (by_head @ v.permute(0, 1, 3, 4, 2)).mul_(decay)
        grad_plain = grad_score.sum(2)
        grad_c += grad_plain @ b
        grad_b += grad_plain.mT @ c
        grad_sums += rows_less_columns(grad_score.mul_(plain)).transpose(2, 3)
        grad_v += (decay.mul_(plain).mT @ by_head).transpose(2, 3)

        grad_decay = grad_sums.flip(2).cumsum(2).flip(2)
        grad_step = torch.linalg.vecdot(grad_v, x).unsqueeze(-1)
        grad_x = grad_v.mul_(step)
        grad_skip = None
        if skip_H is not None:
            grad_x.addcmul_(grad, skip_H.view(b.shape[1], 1, -1, 1))
            if ctx.needs_input_grad[5]:
                grad_skip = torch.linalg.vecdot(grad, x).sum((0, 2)).flatten()
        tokens = [_by_token(chunks, one) for one in (grad_x, grad_step, grad_decay)]
        grad_b_T, grad_c_T = (_by_token(chunks, one.unsqueeze(3)) for one in (grad_b, grad_c))
        return tokens[0], tokens[1].squeeze(-1), tokens[2].squeeze(-1), grad_b_T, grad_c_T, grad_skip, None


def _states(added: Tensor, last: Tensor, chunks: Chunks) -> Tensor:
    """The state at the beginning of each chunk, [N, G, K, R V]. A chunk multiplies the state by its `last`
    [N, G, R, 1], and then adds its `added` [N, G, K, R V]."""
    states = torch.empty_like(added)
    states[chunks.steps[0]] = 0
    for own, after in chunks.transitions:
        kept = _heads(states[own], last) * last[own].unsqueeze(2)
        torch.add(kept.flatten(3), added[own], out=states[after])
    return states


def _states_backward(grad_states: Tensor, states: Tensor, last: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """The gradients of `added` and `last`. `grad_states`: the gradient that comes from the outputs, which is
    overwritten."""
    grad_added, grad_last = torch.zeros_like(states), torch.zeros_like(last)
    for own, after in reversed(chunks.transitions):
        grad_added[own] = grad_states[after]
        heads = _heads(grad_states[after], last)
        grad_last[own] = torch.linalg.vecdot(heads, _heads(states[own], last)).sum(2).unsqueeze(-1)
        _heads(grad_states[own], last).addcmul_(heads, last[own].unsqueeze(2))
    return grad_added, grad_last


def _heads(states: Tensor, last: Tensor) -> Tensor:
    """The states by head: [N, G, K, R, V], a view."""
    return states.unflatten(-1, (last.shape[2], -1))


def _by_group(chunks: Chunks, x_T_H_F: Tensor, groups: int) -> Tensor:
    """The tokens cut into chunks, by group: [N, G, C, R, F], contiguous."""
    return chunks.cut(x_T_H_F).unflatten(2, (groups, -1)).transpose(1, 2).contiguous()


def _by_token(chunks: Chunks, x_N_G_C_R_F: Tensor) -> Tensor:
    """The inverse of `_by_group`: [T, H, F]."""
    return chunks.join(x_N_G_C_R_F.transpose(1, 2).flatten(2, 3))
