"""Depthwise causal convolution over packed sequences: no token sees another sequence's.

    y_t = bias + sum over j of w_j x_(t-j),  over the j for which token t - j is in the same sequence

Shapes: T packed tokens, B sequences in generation, F features, W width of the window, S inputs that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

_ROWS = 256
"""Number of tokens that are computed together, so that their outputs stay in a core's cache from one product to the
next."""


def causal_conv(
    x_T_F: Tensor, weight_F_W: Tensor, bias_F: Tensor | None, lengths: Sequence[int], *, activate: bool
) -> Tensor:
    """The convolution, followed by SiLU if `activate`: [T, F], in the dtype of x. Computes in the dtype of the
    weight."""
    x = x_T_F.to(weight_F_W.dtype)
    out: Tensor = _CausalConv.apply(x, weight_F_W, bias_F, tuple(lengths), activate)
    return out.to(x_T_F.dtype)


def causal_conv_step(
    x_B_F: Tensor, kept_B_F_S: Tensor, weight_F_W: Tensor, bias_F: Tensor | None, *, activate: bool
) -> Tensor:
    """The convolution of one more token of each sequence, followed by SiLU if `activate`: [B, F], in the dtype of the
    weight.

    `kept_B_F_S`: the newest inputs of each sequence, at least W - 1 of them. They are changed in place: the new token's
    input is appended, and the oldest one is dropped. Fastest if the features of an input are contiguous in memory.
    """
    x_B_F = x_B_F.to(weight_F_W.dtype)
    taps_W_F = weight_F_W.T.contiguous()
    y_B_F = x_B_F * taps_W_F[-1] if bias_F is None else torch.addcmul(bias_F, x_B_F, taps_W_F[-1])
    for j in range(1, taps_W_F.shape[0]):
        y_B_F.addcmul_(kept_B_F_S[..., -j].to(y_B_F.dtype), taps_W_F[-1 - j])
    for j in range(kept_B_F_S.shape[-1] - 1):
        kept_B_F_S[..., j] = kept_B_F_S[..., j + 1]
    kept_B_F_S[..., -1] = x_B_F
    return silu(y_B_F, inplace=True) if activate else y_B_F


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_T_F: Tensor, weight_F_W: Tensor, bias_F: Tensor | None, lengths: tuple[int, ...], activate: bool
    ) -> Tensor:
        taps_W_F = weight_F_W.flip(-1).T.contiguous()  # tap j is the weight of the token j places before
        y_T_F = _windows(x_T_F, taps_W_F, bias_F, lengths)
        ctx.lengths, ctx.activate = lengths, activate
        trained = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(taps_W_F, y_T_F if activate else None, x_T_F if trained else None)
        return silu(y_T_F) if activate else y_T_F

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        taps_W_F, y_T_F, x_T_F = ctx.saved_tensors
        grad = grad_outputs[0]
        grad = torch.ops.aten.silu_backward(grad, y_T_F) if ctx.activate else grad.contiguous()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            # The mirror image of forward: token t influences the outputs of itself and the W - 1 tokens after it.
            grad_x = _windows(grad, taps_W_F, None, ctx.lengths, mirrored=True)
        if ctx.needs_input_grad[1]:
            taps = [_tap_gradient(grad, x_T_F, j, ctx.lengths) for j in range(taps_W_F.shape[0])]
            grad_weight = torch.stack(taps).T.flip(-1)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None


def _windows(
    x_T_F: Tensor, taps_W_F: Tensor, bias_F: Tensor | None, lengths: tuple[int, ...], *, mirrored: bool = False
) -> Tensor:
    """The weighted sum of each token and the W - 1 tokens before it, or after it if `mirrored`, within each sequence:
    [T, F]."""
    width, total = taps_W_F.shape[0], x_T_F.shape[0]
    y_T_F = x_T_F.new_empty(x_T_F.shape)
    for start in range(0, total, _ROWS):
        rows = slice(start, min(start + _ROWS, total))
        out = y_T_F[rows]
        if bias_F is None:
            torch.mul(x_T_F[rows], taps_W_F[0], out=out)
        else:
            torch.addcmul(bias_F, x_T_F[rows], taps_W_F[0], out=out)
        for j in range(1, width):
            if mirrored:
                stop = min(rows.stop, total - j)
                if stop > start:
                    out[: stop - start].addcmul_(x_T_F[start + j : stop + j], taps_W_F[j])
            else:
                first = max(start, j)
                if rows.stop > first:
                    out[first - start :].addcmul_(x_T_F[first - j : rows.stop - j], taps_W_F[j])
    # The windows above reach over the borders of sequences, so the tokens near borders are computed again.
    tokens_n, places_n_w = _at_borders(lengths, width, mirrored, x_T_F.device)
    if tokens_n.numel():
        seen_n_w_F = x_T_F[places_n_w.clamp(min=0)].masked_fill((places_n_w < 0).unsqueeze(-1), 0)
        y_n_F = (seen_n_w_F * taps_W_F).sum(1)
        y_T_F[tokens_n] = y_n_F if bias_F is None else y_n_F + bias_F
    return y_T_F


@lru_cache(maxsize=8)
def _at_borders(lengths: tuple[int, ...], width: int, mirrored: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens whose windows reach over a border into a neighbouring sequence, int64 [n], and the W tokens in the
    window of each, int64 [n, W], with -1 for tokens beyond the border."""
    tokens: list[int] = []
    windows: list[list[int]] = []
    start = 0
    for number, length in enumerate(lengths):
        stop = start + length
        if mirrored and number + 1 < len(lengths):
            for token in range(max(start, stop - width + 1), stop):
                tokens.append(token)
                windows.append([token + j if token + j < stop else -1 for j in range(width)])
        elif not mirrored and number:
            for token in range(start, min(stop, start + width - 1)):
                tokens.append(token)
                windows.append([token - j if token - j >= start else -1 for j in range(width)])
        start = stop
    places = torch.tensor(windows, dtype=torch.int64).reshape(len(tokens), width)
    return torch.tensor(tokens, dtype=torch.int64, device=device), places.to(device)


def _tap_gradient(grad_T_F: Tensor, x_T_F: Tensor, j: int, lengths: tuple[int, ...]) -> Tensor:
    """The gradient [F] of the weight for the token j places before."""
    total = torch.zeros_like(grad_T_F[0])
    start = 0
    for length in lengths:
        if length > j:
            total += (grad_T_F[start + j : start + length] * x_T_F[start : start + length - j]).sum(0)
        start += length
    return total
