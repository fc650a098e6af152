"""The gated delta rule over packed sequences, chunk by chunk, for Gated DeltaNet layers.

For each head, with unit keys k_t, queries q_t, values v_t, decays a_t = exp(g_t) and strengths b_t, the state S [K, V]
starts at zero in each sequence:

    S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T,    o_t = S_t^T q_t

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, equation 10). Within a chunk, let c_i be the sum
of g up to token i, D_ij = exp(c_i - c_j) for j <= i, and A the strict lower triangle of b_i (k_i . k_j) D_ij. With the
UT transform of Yang et al., "Parallelizing Linear Transformers with the Delta Rule", arXiv 2406.06484, section 3:

    M = (I + A)^-1,  U = M (b v),  W = M (b e^c k),  Y = U - W S
    o = (e^c q) S + (tril(q k^T) * D) Y
    S' = e^(c_C) S + (e^(c_C - c) k)^T Y

Only Y and S' depend on the chunk before, so everything else is one batched product for all chunks of all sequences.

Shapes: T packed tokens, H heads, K key dimension, V value dimension, N chunks, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tinsmith.modeling.kernels.chunks import Chunks, chunks_of

_EPS = 1e-6
"""Added to the squared norm of queries and keys, as in flash-linear-attention."""
_CHUNK = 32
"""Tokens of a chunk. Fastest of 16, 32 and 64 on a CPU, for sequences of equal length and heads of 64 features."""


def gated_delta_rule(
    q_T_H_K: Tensor, k_T_H_K: Tensor, v_T_H_V: Tensor, g_T_H: Tensor, beta_T_H: Tensor, lengths: Sequence[int]
) -> Tensor:
    """The outputs [T, H, V], in the dtype of q. Queries and keys are normalised here, and queries are divided by the
    square root of K. Computes in float32, or in float64 for float64 inputs."""
    dtype = torch.float64 if q_T_H_K.dtype == torch.float64 else torch.float32
    chunks = chunks_of(tuple(lengths), _CHUNK)
    inputs = (x.to(dtype) for x in (q_T_H_K, k_T_H_K, v_T_H_V, g_T_H, beta_T_H))
    out: Tensor = _GatedDeltaRule.apply(*inputs, chunks)
    return out.to(q_T_H_K.dtype)


class _GatedDeltaRule(torch.autograd.Function):
    """Differentiated by hand: autograd would keep each intermediate result, and copy all chunks for each step of the
    scan."""

    @staticmethod
    def forward(ctx: Any, q_T: Tensor, k_T: Tensor, v_T: Tensor, g_T: Tensor, beta_T: Tensor, chunks: Chunks) -> Tensor:
        q, k, v = (_by_head(chunks, x) for x in (q_T, k_T, v_T))  # [N, H, C, features]
        g, beta = (_by_head(chunks, x.unsqueeze(-1)) for x in (g_T, beta_T))  # [N, H, C, 1]
        scale = k.shape[-1] ** -0.5
        norm_q, norm_k = _unit(q), _unit(k)
        q.mul_(norm_q * scale)
        k.mul_(norm_k)
        c = g.cumsum(-2)
        decay = decay_of(c)
        similar = (k @ k.mT).mul_(decay)
        inverse = _inverse(similar * beta)
        grown = c.exp()
        u, w = inverse @ (v * beta), inverse @ (k * (beta * grown))
        left = (c[..., -1:, :] - c).exp()
        states, y = _scan(u, w, k * left, grown[..., -1:, :], chunks)
        score = (q @ k.mT).mul_(decay)
        out = (q * grown) @ states
        out += score @ y
        ctx.chunks, ctx.scale = chunks, scale
        ctx.save_for_backward(q, k, v, beta, norm_q, norm_k, c, inverse, y, states, u, w)
        return _by_token(chunks, out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, norm_q, norm_k, c, inverse, y, states, u, w = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        decay, grown, left = decay_of(c), c.exp(), (c[..., -1:, :] - c).exp()
        score, similar = (q @ k.mT).mul_(decay), (k @ k.mT).mul_(decay)
        last, k_left, q_grown = grown[..., -1:, :], k * left, q * grown
        grad = _by_head(chunks, grad_outputs[0])

        grad_y, grad_k_left, grad_last = _scan_backward(
            score.mT @ grad, q_grown.mT @ grad, y, states, w, k_left, last, chunks
        )
        # Outputs: through the state, and through the scores
        grad_q_grown = grad @ states.mT
        grad_score = (grad @ y.mT).mul_(decay)
        grad_q = grad_q_grown * grown
        grad_q += grad_score @ k
        grad_k = grad_score.mT @ q
        through_scores = grad_score.mul_(q @ k.mT)
        grad_c = _dot(grad_q_grown, q_grown) + rows_less_columns(through_scores)
        # U and W, by (I + A)^-1
        grad_b_v = inverse.mT @ grad_y
        grad_b_k = (inverse.mT @ (grad_y @ states.mT)).neg_()
        grad_a = (grad_b_v @ u.mT).add_(grad_b_k @ w.mT).neg_().mul_(_strict(k.shape[-2], k.dtype, k.device))
        grad_beta = _dot(grad_b_v, v)
        grad_v = grad_b_v.mul_(beta)
        along = _dot(grad_b_k, k).mul_(grown)
        grad_beta += along
        grad_c += along * beta
        grad_k += grad_b_k.mul_(beta * grown)
        # A = b_i (k_i . k_j) D_ij
        through_a = grad_a * similar
        grad_beta += through_a.sum(-1, keepdim=True)
        grad_c += rows_less_columns(through_a.mul_(beta))
        grad_a.mul_(decay).mul_(beta)
        grad_k += grad_a @ k
        grad_k += grad_a.mT @ k
        # The keys that the next state gets
        along = _dot(grad_k_left, k_left)
        grad_c -= along
        grad_c[..., -1:, :] += along.sum(-2, keepdim=True) + grad_last * last
        grad_k += grad_k_left.mul_(left)

        grad_g = grad_c.flip(-2).cumsum(-2).flip(-2)
        _unit_backward(grad_q, q, norm_q, ctx.scale)
        _unit_backward(grad_k, k, norm_k, 1.0)
        grads = (grad_q, grad_k, grad_v, grad_g, grad_beta)
        joined = [_by_token(chunks, one) for one in grads]
        return joined[0], joined[1], joined[2], joined[3].squeeze(-1), joined[4].squeeze(-1), None


def _scan(u: Tensor, w: Tensor, k_left: Tensor, last: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """The state at the beginning of each chunk, [N, H, K, V], and Y, [N, H, C, V]."""
    states = u.new_empty(*u.shape[:2], w.shape[-1], u.shape[-1])
    y = torch.empty_like(u)
    states[chunks.steps[0]] = 0
    first = chunks.steps[0]
    y[first] = u[first]
    for own, after in chunks.transitions:
        torch.mul(states[own], last[own], out=states[after])
        states[after] += k_left[own].mT @ y[own]
        torch.sub(u[after], w[after] @ states[after], out=y[after])
    return states, y


def _scan_backward(
    grad_y: Tensor, grad_states: Tensor, y: Tensor, states: Tensor, w: Tensor, k_left: Tensor, last: Tensor,
    chunks: Chunks,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of Y, of `k_left`, and of `last`.

    grad_y and grad_states are the gradients that come from the outputs. Both are overwritten.
    """
    grad_k_left, grad_last = torch.zeros_like(k_left), torch.zeros_like(last)
    for own, after in reversed(chunks.transitions):
        grad_after = grad_states[after]
        grad_after -= w[after].mT @ grad_y[after]
        grad_y[own] += k_left[own] @ grad_after
        torch.matmul(y[own], grad_after.mT, out=grad_k_left[own])
        grad_last[own] = torch.linalg.vecdot(grad_after.flatten(-2), states[own].flatten(-2))[..., None, None]
        grad_states[own].addcmul_(grad_after, last[own])
    return grad_y, grad_k_left, grad_last


def _by_head(chunks: Chunks, x_T_H_F: Tensor) -> Tensor:
    """The tokens cut into chunks, by head: [N, H, C, F], a new tensor."""
    x = chunks.cut(x_T_H_F).transpose(1, 2)
    return x.contiguous() if not x.is_contiguous() else x.clone()


def _by_token(chunks: Chunks, x_N_H_C_F: Tensor) -> Tensor:
    """The inverse of `_by_head`: [T, H, F]."""
    return chunks.join(x_N_H_C_F.transpose(1, 2))


def _unit(x: Tensor) -> Tensor:
    """The factor of each row, [..., 1], that gives the row the norm 1."""
    return torch.linalg.vecdot(x, x).add_(_EPS).rsqrt_().unsqueeze(-1)


def _unit_backward(grad: Tensor, y: Tensor, norm: Tensor, scale: float) -> None:
    """Converts `grad`, the gradient of y = x * norm * scale, to the gradient of x, in place."""
    # dx = norm scale (dy - y (y . dy) / scale^2)
    grad.addcmul_(y, _dot(grad, y), value=-(scale**-2)).mul_(norm * scale)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b).unsqueeze(-1)


def rows_less_columns(x: Tensor) -> Tensor:
    """The gradient of c, [..., C, 1], from the gradient x of c_i - c_j, [..., C, C]."""
    return (x.sum(-1) - x.sum(-2)).unsqueeze(-1)


def decay_of(c: Tensor) -> Tensor:
    """D_ij = exp(c_i - c_j) for j <= i, and 0 above the diagonal: [..., C, C]."""
    return (c - c.mT).add_(_above(c.shape[-2], c.dtype, c.device)).exp_()


def _inverse(a: Tensor) -> Tensor:
    """(I + A)^-1 of the strict lower triangle of A; the rest of A is not read."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)


@cache
def _above(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Minus infinity above the diagonal, and 0 elsewhere."""
    return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu(1)


@cache
def _strict(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 below the diagonal, and 0 elsewhere."""
    return torch.ones(size, size, dtype=dtype, device=device).tril(-1)
