"""Gated DeltaNet on a CPU, for all dtypes but bfloat16: vLLM's CPU kernels compute bfloat16 only.

Shapes: T tokens of a step, N sequences, F features of the convolution, w inputs that its window keeps, W its width, H
heads of values, K and V features of a key and of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule
from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.mamba.mamba_utils import (  # pyright: ignore[reportMissingImports]
    is_conv_state_dim_first,
)
from vllm.utils.torch_utils import _resolve_layer_name  # pyright: ignore[reportMissingImports]

from tinsmith.modeling.kernels.causal_conv import causal_conv
from tinsmith.modeling.kernels.delta_step import gated_delta_step


def compute(qkv_T_F: Tensor, b_T_H: Tensor, a_T_H: Tensor, out_T_H_V: Tensor, layer_name: Any) -> None:
    """vLLM's `cpu_gdn_attention_core`: the convolution and the recurrence of one layer for all sequences of a step.
    Changes their states, and writes the outputs."""
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures memory in such calls
        return
    step = context.attn_metadata[layer.prefix]
    count = step.num_decodes + step.num_prefills
    if not count:
        return
    slots_N = step.non_spec_state_indices_tensor[:count].long()
    starts = step.non_spec_query_start_loc[: count + 1].tolist()
    begun_N = torch.ones(count, dtype=torch.bool)
    if step.has_initial_state is not None:
        begun_N[step.num_decodes :] = step.has_initial_state[step.num_decodes : count]

    windows, states = layer.kv_cache[0], layer.kv_cache[1]  # states: [slots, H, V, K]
    if is_conv_state_dim_first():
        windows = windows.transpose(1, 2)  # [slots, w, F]
    states_N_H_K_V = states[slots_N].mT.masked_fill(~begun_N[:, None, None, None], 0).contiguous()
    windows_N_w_F = windows[slots_N].masked_fill(~begun_N[:, None, None], 0)

    q_T_H_K, k_T_H_K, v_T_H_V = _heads(layer, _convolved(layer, qkv_T_F, windows_N_w_F, starts))
    decay_T_H = -layer.A_log.float().exp() * softplus(a_T_H.float() + layer.dt_bias.float())
    beta_T_H = b_T_H.float().sigmoid()
    singles = step.num_decodes
    if singles:  # they come first
        first = slice(singles)
        out_T_H_V[first] = gated_delta_step(
            q_T_H_K[first], k_T_H_K[first], v_T_H_V[first], decay_T_H[first], beta_T_H[first],
            states_N_H_K_V[first], normalize=True,
        )  # fmt: skip
    for n in range(singles, count):
        rows = slice(starts[n], starts[n + 1])
        out, state = torch_chunk_gated_delta_rule(
            *(one[None, rows] for one in (q_T_H_K, k_T_H_K, v_T_H_V, decay_T_H, beta_T_H)),
            initial_state=states_N_H_K_V[n : n + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        out_T_H_V[rows] = out[0]
        states_N_H_K_V[n] = state
    states[slots_N] = states_N_H_K_V.mT.to(states.dtype)
    windows[slots_N] = windows_N_w_F.to(windows.dtype)


def _convolved(layer: Any, x_T_F: Tensor, windows_N_w_F: Tensor, starts: list[int]) -> Tensor:
    """[T, F]. Each sequence begins with what its window holds, which then gets its newest inputs."""
    kept = windows_N_w_F.shape[1]
    parts = [
        torch.cat([window, x_T_F[start:stop]])
        for window, start, stop in zip(windows_N_w_F, starts[:-1], starts[1:], strict=True)
    ]
    weight_F_W = layer.conv1d.weight.view(layer.conv1d.weight.shape[0], -1)
    lengths = [len(part) for part in parts]
    y_F = causal_conv(torch.cat(parts), weight_F_W, layer.conv1d.bias, lengths, activate=layer.activation == "silu")
    for n, part in enumerate(parts):
        windows_N_w_F[n] = part[-kept:]
    return torch.cat([one[kept:] for one in y_F.split(lengths)])


def _heads(layer: Any, qkv_T_F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float32, all with as many heads as the values."""
    q, k, v = (one[0].float() for one in layer.rearrange_mixed_qkv(qkv_T_F))
    times = v.shape[1] // k.shape[1]
    return q.repeat_interleave(times, 1), k.repeat_interleave(times, 1), v
