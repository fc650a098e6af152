"""One step of Mamba2's state space, for generation on a CPU. Passes through the states take most of its time.

Shapes: B sequences, H heads, G groups of heads with one b and c, P features of a head, N features of a state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinsmith.modeling.kernels.delta_step import blocks_of


def state_space_step(
    x_B_H_P: Tensor,
    step_B_H: Tensor,
    a_H: Tensor,
    b_B_G_N: Tensor,
    c_B_G_N: Tensor,
    skip_H: Tensor | None,
    state_B_H_P_N: Tensor,
) -> Tensor:
    """The output for one token of each sequence, [B, H, P]. Changes the states in place; they must be contiguous.

    S' = exp(step a) S + step x b^T, and the output is S' c + skip x (Dao and Gu, Transformers are SSMs,
    arXiv:2405.21060). One exponential is computed for each head; transformers computes one for each element of the
    states.
    """
    num_sequences, num_heads = step_B_H.shape
    per_group = num_heads // b_B_G_N.shape[1]
    b_BH_N, c_BH_N = (one.repeat_interleave(per_group, 1).flatten(0, 1) for one in (b_B_G_N, c_B_G_N))
    decay_BH_1_1 = (step_B_H * a_H).exp_().flatten()[:, None, None]
    input_BH_P = (x_B_H_P * step_B_H[..., None]).flatten(0, 1)
    out_BH_P_1 = x_B_H_P.new_empty(num_sequences * num_heads, x_B_H_P.shape[2], 1)
    state_BH_P_N = state_B_H_P_N.view(-1, *state_B_H_P_N.shape[2:])
    for block in blocks_of(state_BH_P_N):
        states = state_BH_P_N[block].mul_(decay_BH_1_1[block])
        states.baddbmm_(input_BH_P[block][..., None], b_BH_N[block][:, None])
        torch.bmm(states, c_BH_N[block][..., None], out=out_BH_P_1[block])
    out_B_H_P = out_BH_P_1.view(num_sequences, num_heads, -1)
    return out_B_H_P if skip_H is None else out_B_H_P.addcmul_(x_B_H_P, skip_H[:, None])
