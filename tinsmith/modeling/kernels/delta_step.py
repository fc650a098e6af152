"""One step of the gated delta rule, in generation on a CPU, where the passes through the states are most of the time.

Shapes: B sequences, H heads, K features of a key, V features of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-6
"""transformers' constant in the norm of queries and keys."""


def gated_delta_step(
    query_B_H_K: Tensor,
    key_B_H_K: Tensor,
    value_B_H_V: Tensor,
    log_decay_B_H: Tensor,
    beta_B_H: Tensor,
    state_B_H_K_V: Tensor,
    *,
    normalize: bool,
) -> Tensor:
    """The rule's output for one token of each sequence, [B, H, V]. Changes the states, which must be contiguous, in
    place.

    With decay a, S' = a S + k d^T where d = beta (v - (a S)^T k), and the output is S'^T q = (a S)^T q + (k q) d
    (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024). S is read once for both products, and changed twice.
    """
    if normalize:
        query_B_H_K, key_B_H_K = _unit(query_B_H_K), _unit(key_B_H_K)
    query_B_H_K = query_B_H_K * query_B_H_K.shape[-1] ** -0.5
    decay_B_H_1_1 = log_decay_B_H.exp()[..., None, None]
    both_B_H_2_V = (torch.stack([key_B_H_K, query_B_H_K], 2) @ state_B_H_K_V).mul_(decay_B_H_1_1)
    delta_B_H_V = (value_B_H_V - both_B_H_2_V[:, :, 0]).mul_(beta_B_H[..., None])
    out_B_H_V = torch.addcmul(
        both_B_H_2_V[:, :, 1], torch.linalg.vecdot(key_B_H_K, query_B_H_K)[..., None], delta_B_H_V
    )
    states = state_B_H_K_V.mul_(decay_B_H_1_1).view(-1, *state_B_H_K_V.shape[2:])
    states.baddbmm_(key_B_H_K.flatten(0, 1)[..., None], delta_B_H_V.flatten(0, 1)[:, None])
    return out_B_H_V


def _unit(x: Tensor) -> Tensor:
    return x * x.square().sum(-1, keepdim=True).add_(_EPS).rsqrt_()
