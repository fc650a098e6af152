"""A varlen kernel in plain torch, as flash attention works: it returns a log-sum-exp, and its backward makes the
probabilities again from the log-sum-exp and the output that it is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from tinsmith.modeling.heads import Heads
from tinsmith.modeling.kernels.varlen import Segments, left_of


class ReferenceVarlen:
    def __init__(self) -> None:
        self.num_calls = 0

    def takes(self, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> bool:
        return heads.softcap is None

    def forward(
        self, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, segments: Segments, heads: Heads
    ) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        out_T_N_D = torch.empty_like(q_T_N_D)
        lse_N_T = torch.empty(q_T_N_D.shape[1], q_T_N_D.shape[0])
        for rows in _rows(segments):
            scores_N_T_L = _scores(q_T_N_D[rows], k_T_K_D[rows], left_of(heads, segments), heads.scale)
            lse_N_T[:, rows] = scores_N_T_L.logsumexp(-1)
            probabilities = scores_N_T_L.softmax(-1)
            out_T_N_D[rows] = torch.einsum("ntl,lnd->tnd", probabilities, _repeated(v_T_K_D[rows], q_T_N_D.shape[1]))
        return out_T_N_D, lse_N_T

    def backward(
        self,
        grad_T_N_D: Tensor,
        q_T_N_D: Tensor,
        k_T_K_D: Tensor,
        v_T_K_D: Tensor,
        out_T_N_D: Tensor,
        lse_N_T: Tensor,
        segments: Segments,
        heads: Heads,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads = q_T_N_D.shape[1], k_T_K_D.shape[1]
        grads = tuple(torch.empty_like(x) for x in (q_T_N_D, k_T_K_D, v_T_K_D))
        for rows in _rows(segments):
            q, grad = q_T_N_D[rows], grad_T_N_D[rows]
            k, v = (_repeated(x[rows], num_heads) for x in (k_T_K_D, v_T_K_D))
            scores_N_T_L = _scores(q, k_T_K_D[rows], left_of(heads, segments), heads.scale)
            probabilities = (scores_N_T_L - lse_N_T[:, rows, None]).exp()
            correction_N_T = (grad * out_T_N_D[rows]).sum(-1).T
            grad_scores = probabilities * (torch.einsum("tnd,lnd->ntl", grad, v) - correction_N_T[..., None])
            grads[0][rows] = torch.einsum("ntl,lnd->tnd", grad_scores, k) * heads.scale
            grad_k = torch.einsum("ntl,tnd->lnd", grad_scores, q) * heads.scale
            grad_v = torch.einsum("ntl,tnd->lnd", probabilities, grad)
            for out, whole in ((grads[1], grad_k), (grads[2], grad_v)):
                out[rows] = whole.unflatten(1, (num_kv_heads, -1)).sum(2)
        return grads[0], grads[1], grads[2]


def _rows(segments: Segments) -> Iterator[slice]:
    for first, stop in itertools.pairwise(segments.starts.tolist()):
        yield slice(first, stop)


def _repeated(x_L_K_D: Tensor, num_heads: int) -> Tensor:
    return x_L_K_D.repeat_interleave(num_heads // x_L_K_D.shape[1], 1)


def _scores(q_T_N_D: Tensor, k_T_K_D: Tensor, left: int, scale: float) -> Tensor:
    """[N, T, L], -inf where the token does not look: after itself, and more than `left` before itself."""
    scores = torch.einsum("tnd,lnd->ntl", q_T_N_D, _repeated(k_T_K_D, q_T_N_D.shape[1])) * scale
    ago = torch.arange(scores.shape[1])[:, None] - torch.arange(scores.shape[2])
    seen = (ago >= 0) & (ago <= left) if left >= 0 else ago >= 0
    return scores.masked_fill(~seen, float("-inf"))
