"""Layers that carry a state from token to token (a recurrence, or a convolution over time), over packed sequences.

The state starts anew at each sequence. transformers' own functions for such layers do not know where sequences begin.
A layer whose functions are all known here keeps its own code, in which these functions are replaced by functions that
take the lengths of the sequences (kernels/). Any other layer computes the sequences side by side, padded (padded.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.kernels import recurrent_cuda
from tinsmith.modeling.kernels.causal_conv import causal_conv, causal_conv_step
from tinsmith.modeling.kernels.delta_rule import gated_delta_rule
from tinsmith.modeling.kernels.delta_step import gated_delta_step
from tinsmith.modeling.kernels.install import with_functions
from tinsmith.modeling.kernels.state_space import state_space_scan
from tinsmith.modeling.kernels.state_space_step import state_space_step
from tinsmith.modeling.padded import BatchwiseForward, carries_state

_SILU = ("silu", "swish")


def call_packages_where_they_work(model: nn.Module) -> None:
    """Makes the layers that carry a state compute in torch where an optional package, which transformers calls by
    itself, does not take their tensors, such as on a CPU. To be called before the model's first pass."""
    for layer in model.modules():
        if not carries_state(layer):
            continue
        forward = inspect.unwrap(type(layer).forward)
        if isinstance(forward, FunctionType) and (called := _of_packages(forward)):
            scope = forward.__globals__
            replaced = {name: recurrent_cuda.where_it_works(scope[name]) for name in called}
            layer.forward = MethodType(with_functions(forward, replaced), layer)


def pack_recurrent(decoder: nn.Module, active: ActiveRuns) -> tuple[list[str], bool]:
    """Makes every layer that carries a state compute packed sequences. A layer with known functions takes the sequences
    of `active.lengths`; a layer with unknown functions takes the padded batches of `active.padded`. Returns the names
    of the classes of all these layers, and whether any of them needs `active.padded`."""
    layers = [module for module in decoder.modules() if carries_state(module)]
    pads = False
    for layer in layers:
        forward = inspect.unwrap(type(layer).forward)
        if isinstance(forward, FunctionType) and _is_known(forward):
            replaced = {
                name: partial(ours, active, recurrent_cuda.where_it_works(forward.__globals__[name]))
                for name, ours in _FUNCTIONS.items()
                if name in forward.__code__.co_names
            }
            layer.forward = BatchwiseForward(MethodType(with_functions(forward, replaced), layer), active, packs=True)
        else:
            layer.forward = BatchwiseForward(layer.forward, active)
            pads = True
    return sorted({type(layer).__name__ for layer in layers}), pads


def _is_known(forward: FunctionType) -> bool:
    """Whether every function over tokens that a layer's forward calls is replaced here, or is not called in a pass over
    whole sequences."""
    called = _of_packages(forward)
    return "causal_conv1d_fn" in called and called <= {*_FUNCTIONS, *_OF_OTHER_PASSES}


def _of_packages(forward: FunctionType) -> set[str]:
    """Names of the functions in a layer's forward that call an optional package if transformers has found it."""
    return {name for name in forward.__code__.co_names if hasattr(forward.__globals__.get(name), "__wrapped__")}


def _conv(
    active: ActiveRuns,
    theirs: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """Replaces transformers' causal_conv1d_fn: from [1, F, T] to [1, F, T]."""
    if not active.lengths:
        return theirs(hidden_states, weight, bias, activation=activation, **others)
    fused = recurrent_cuda.function("causal_conv1d_fn", hidden_states)
    if fused is not None and activation in (None, *_SILU):
        numbers = recurrent_cuda.numbers_of(active.lengths, hidden_states.device)
        return fused(hidden_states, weight, bias, seq_idx=numbers, activation=activation)
    x_T_F = hidden_states.squeeze(0).transpose(0, 1)
    y_T_F = causal_conv(x_T_F, weight, bias, active.lengths, activate=activation in _SILU)
    if activation is not None and activation not in _SILU:
        y_T_F = ACT2FN[activation](y_T_F)
    return y_T_F.transpose(0, 1)[None]


def _conv_step(
    active: ActiveRuns,
    theirs: Callable[..., Tensor],
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Replaces transformers' causal_conv1d_update: from [B, F, 1] to [B, F, 1]. Changes the window in place."""
    is_plain = hidden_states.device.type == "cpu" and hidden_states.shape[2] == 1 and activation in (None, *_SILU)
    if not is_plain or conv_state.shape[2] + 1 < weight.shape[1] or torch.is_grad_enabled():
        return theirs(hidden_states, conv_state, weight, bias, activation)
    out = causal_conv_step(hidden_states[..., 0], conv_state, weight, bias, activate=activation is not None)
    return out.to(hidden_states.dtype)[..., None]


def _delta_rule(
    active: ActiveRuns,
    theirs: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **others: Any,
) -> tuple[Tensor, None]:
    """Replaces transformers' torch_chunk_gated_delta_rule, on tensors [1, T, ...]."""
    if not active.lengths:
        return theirs(query, key, value, g=g, beta=beta, **others)
    if not others.get("use_qk_l2norm_in_kernel") or others.get("initial_state") is not None:
        raise ValueError("the packed gated delta rule is for normalized keys and sequences from their beginning")
    fused = recurrent_cuda.function("chunk_gated_delta_rule", query)
    if fused is not None:
        borders = recurrent_cuda.borders_of(active.lengths, query.device)
        out, _ = fused(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=borders)
        return out, None
    q, k, v, g, beta = (one.squeeze(0) for one in (query, key, value, g, beta))
    return gated_delta_rule(q, k, v, g, beta, active.lengths)[None], None


def _delta_step(
    active: ActiveRuns,
    theirs: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Replaces transformers' torch_recurrent_gated_delta_rule, on tensors [B, 1, ...]. Changes the state in place."""
    given = (query, key, value, g, beta)
    is_plain = query.device.type == "cpu" and all(one.dtype == torch.float32 for one in given)
    has_state = initial_state is not None and initial_state.is_contiguous() and query.shape[1] == 1
    if not is_plain or not has_state or torch.is_grad_enabled():
        settings = {"initial_state": initial_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **others}
        return theirs(query, key, value, g=g, beta=beta, **settings)
    assert initial_state is not None
    q, k, v, decay, strength = (one[:, 0] for one in given)
    out = gated_delta_step(q, k, v, decay, strength, initial_state, normalize=use_qk_l2norm_in_kernel)
    return out[:, None], initial_state


def _mamba2(
    active: ActiveRuns,
    theirs: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, torch.inf),
    **others: Any,
) -> Any:
    """Replaces transformers' mamba2_chunk_scan, on tensors [1, T, ...]."""
    if not active.lengths:
        settings = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, **others}
        return theirs(hidden_states, dt, A, B, C, chunk_size, **settings)
    if others.get("initial_states") is not None or others.get("z") is not None or others.get("return_final_states"):
        raise ValueError("the packed Mamba2 scan is for sequences from their beginning, without a gate")
    fused = recurrent_cuda.function("mamba_chunk_scan_combined", hidden_states)
    if fused is not None:
        settings = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        numbers = recurrent_cuda.numbers_of(active.lengths, hidden_states.device)
        return fused(hidden_states, dt, A, B, C, chunk_size, seq_idx=numbers, **settings)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    step = torch.clamp(softplus(dt) if dt_softplus else dt, *dt_limit)
    x, step, b, c = (one.squeeze(0) for one in (hidden_states, step, B, C))
    return state_space_scan(x, step, A, b, c, D, active.lengths)[None]


def _mamba2_step(
    active: ActiveRuns,
    theirs: Callable[..., Tensor],
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Replaces transformers' mamba2_selective_state_update: from [B, H, P] to [B, H, P]. Calls transformers' function
    unless A, D and the step sizes are expanded from one number for each head. Changes the state in place."""
    given = [one for one in (state, hidden_states, dt, A, B, C, D, dt_bias) if one is not None]
    is_plain = state.device.type == "cpu" and all(one.dtype == torch.float32 for one in given)
    of_heads = [one.stride(-1) for one in (dt, A, D, dt_bias) if one is not None] + [A.stride(-2)]
    if not is_plain or any(of_heads) or z is not None or not state.is_contiguous() or torch.is_grad_enabled():
        settings = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z, **others}
        return theirs(state, hidden_states, dt, A, B, C, **settings)
    step = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[:, 0]
    step = softplus(step) if dt_softplus else step
    return state_space_step(hidden_states, step, A[:, 0, 0], B, C, None if D is None else D[:, 0], state)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": _conv_step,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_step,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_selective_state_update": _mamba2_step,
}
"""Replacements of transformers' functions, by their names there."""
_OF_OTHER_PASSES = ("mamba2_split_conv1d_scan_combined",)
"""Functions that are called for models in training mode only."""
