"""Attention over sequences that are laid end to end without padding, in training and in generation.

Sequences that begin alike may share segments (prefixes.py). Attention to a row's own segment and to the segments before
it is then computed in parts, which are joined by the logarithms of their sums of exponentials (lse), as in "Online
normalizer calculation for softmax" (arXiv:1805.02867). The backward pass of each part takes the joined output and the
joined sums, so it yields the exact gradients.

This attention is registered with transformers as the implementation "tinsmith". Every Hugging Face model whose
attention goes through `AttentionInterface` runs on it unchanged. Each forward pass gets a `Layout` as a keyword
argument.

Shapes: T packed tokens, N query heads, K key/value heads, D head dimension, L keys, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tinsmith.modeling.heads import Heads
from tinsmith.modeling.kernels import varlen

if TYPE_CHECKING:
    from tinsmith.modeling.latent import Latent

NAME = "tinsmith"

_HIDDEN = -1e30
"""Score of a hidden token. It is finite, because all tokens of one part of the attention may be hidden from a query."""


class WithoutLayout(TypeError):
    """Attention was called without a layout."""


class Layout(Protocol):
    """The arrangement of the tokens of a forward pass, which decides which tokens each token sees."""

    def attend(self, layer: int, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> Tensor:
        """Attention output of the layer with number `layer`, [T, N, D]."""
        ...

    def with_ahead(self, ahead: Ahead | None) -> Layout:
        """This layout for one forward pass in which the tokens of pictures also see later tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Flash:
    """A variable-length attention kernel, and the positions of the sequences in the form that it takes."""

    kernel: varlen.Kernel
    segments: varlen.Segments


@dataclass(frozen=True, slots=True)
class Ahead:
    """The tokens of pictures that see each other in both directions, as in Gemma 3."""

    numbers_T: Tensor
    """int64: for each row the number of its picture, or -1. Pictures of one sequence have different numbers."""
    in_windows_only: bool
    """Whether these tokens see each other only in layers whose attention has a window."""

    def concerns(self, heads: Heads) -> bool:
        """Whether these tokens see each other in a layer with these settings."""
        return heads.window is not None or not self.in_windows_only


@dataclass(frozen=True, slots=True)
class Packed:
    """Whole sequences, end to end, for training and scoring. A token sees only its own sequence."""

    lengths: Sequence[int]
    """Length of each sequence; with `below`, of each segment."""
    below: Sequence[int] = ()
    """For each segment the number of rows that continue it, which follow directly after it. Empty if no sequences
    share a segment."""
    flash: Flash | None = None
    """The kernel for the layers that it supports; None without one."""
    ahead: Ahead | None = None
    """The tokens that see later tokens; None if there are none."""

    def with_ahead(self, ahead: Ahead | None) -> Packed:
        """This layout, in which the tokens of pictures also see later tokens. The border of a segment must not cut a
        picture."""
        return replace(self, ahead=ahead)

    def with_kernel(self, kernel: varlen.Kernel | None, device: torch.device) -> Packed:
        """This layout for one forward pass on `device`. The kernel computes the layers that it supports."""
        if kernel is None or self.below:
            return replace(self, flash=None)
        return replace(self, flash=Flash(kernel, varlen.Segments.of(self.lengths, device)))

    def attend(self, layer: int, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> Tensor:
        if self.ahead is not None and self.ahead.concerns(heads):
            return self._attend_ahead(self.ahead, q_T_N_D, k_T_K_D, v_T_K_D, heads)
        if self.flash is not None and self.flash.kernel.takes(q_T_N_D, k_T_K_D, v_T_K_D, heads):
            return varlen.attend(self.flash.kernel, q_T_N_D, k_T_K_D, v_T_K_D, self.flash.segments, heads)
        if _is_plain(q_T_N_D, v_T_K_D, heads):
            if not torch.is_grad_enabled():
                return attend(q_T_N_D, k_T_K_D, v_T_K_D, self, heads)[0]
            return _Attend.apply(q_T_N_D, k_T_K_D, v_T_K_D, self, heads)
        outputs = []
        if self.below:
            for rows, before in self.paths():
                q = q_T_N_D[rows]
                k, v = (torch.cat([x[part] for part in (*before, rows)]) for x in (k_T_K_D, v_T_K_D))
                q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
                outputs.append(causal(q, k, v, heads)[0].transpose(0, 1))
            return torch.cat(outputs)
        for rows, shape in self.blocks():
            q, k, v = (x[rows].unflatten(0, shape).transpose(1, 2) for x in (q_T_N_D, k_T_K_D, v_T_K_D))
            outputs.append(causal(q, k, v, heads).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _attend_ahead(self, ahead: Ahead, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> Tensor:
        outputs = []
        for rows, before in self.paths():
            q = q_T_N_D[rows].transpose(0, 1)[None]
            k, v = (torch.cat([x[part] for part in (*before, rows)]).transpose(0, 1)[None] for x in (k_T_K_D, v_T_K_D))
            numbers_L = torch.cat([ahead.numbers_T[part] for part in (*before, rows)])
            outputs.append(causal(q, k, v, heads, numbers_L)[0].transpose(0, 1))
        return torch.cat(outputs)

    def blocks(self) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Rows of consecutive sequences of equal length, which one batched call computes, with the number of sequences
        and their length."""
        start = 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            yield slice(start, start + count * length), (count, length)
            start += count * length

    def paths(self) -> Iterator[tuple[slice, Sequence[slice]]]:
        """The rows of each segment, with the rows of the segments that precede it in its sequences, in order."""
        before: list[tuple[int, slice]] = []
        start = 0
        for length, below in zip(self.lengths, self.below or [0] * len(self.lengths), strict=True):
            rows = slice(start, start + length)
            while before and start >= before[-1][0]:
                before.pop()
            yield rows, [part for _, part in before]
            before.append((rows.stop + below, rows))
            start = rows.stop

    def shared(self) -> Iterator[tuple[slice, slice, int]]:
        """For each segment that several sequences share: its rows, the rows that continue it, and the position of its
        first row in the sequences."""
        for (rows, before), below in zip(self.paths(), self.below, strict=True):
            if below:
                yield rows, slice(rows.stop, rows.stop + below), _num_rows(before)

    def positions(self, rows: slice) -> Tensor:
        """The positions of rows in their sequences, int64. `rows`: the rows of some whole segments."""
        found = []
        for own, before in self.paths():
            if rows.start <= own.start < rows.stop:
                depth = _num_rows(before)
                found.append(torch.arange(depth, depth + own.stop - own.start))
        return torch.cat(found)


def _num_rows(parts: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in parts)


def _is_plain(q_T_N_D: Tensor, v_T_K_D: Tensor, heads: Heads) -> bool:
    """Whether `attend` can compute this attention."""
    same = q_T_N_D.shape[-1] == v_T_K_D.shape[-1] and q_T_N_D.dtype == v_T_K_D.dtype
    known = q_T_N_D.device.type == "cpu" and q_T_N_D.dtype in (torch.float32, torch.bfloat16)
    return same and known and heads.softcap is None and heads.sinks_N is None


class _Attend(torch.autograd.Function):
    """Plain causal attention as one autograd node for all sequences. With one node for each sequence, the gradient of
    each sequence's rows would be a tensor of the size of all rows."""

    @staticmethod
    def forward(ctx: Any, q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, layout: Packed, heads: Heads) -> Tensor:
        out_T_N_D, sums = attend(q_T_N_D, k_T_K_D, v_T_K_D, layout, heads)
        ctx.save_for_backward(q_T_N_D, k_T_K_D, v_T_K_D, out_T_N_D, *sums)
        ctx.layout, ctx.heads = layout, heads
        return out_T_N_D

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *sums = ctx.saved_tensors
        grads = attend_backward(grad_outputs[0], q, k, v, out, sums, ctx.layout, ctx.heads)
        return *grads.split([q.shape[1], k.shape[1], v.shape[1]], 1), None, None


def attend(
    q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, layout: Packed, heads: Heads
) -> tuple[Tensor, list[Tensor]]:
    """Plain causal attention on a CPU. Returns the output [T, N, D], and the log-sum-exps of the scores, in the form
    that `attend_backward` takes."""
    outputs, sums = [], []
    for rows, shape in layout.blocks():
        q, k, v = (_block(x, rows, shape) for x in (q_T_N_D, k_T_K_D, v_T_K_D))
        mask = _window_mask(q, heads)
        out, sum_B_N_T = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=heads.scale
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        sums.append(sum_B_N_T)
    out_T_N_D = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if not layout.below:
        return out_T_N_D, sums
    lse_T_N = torch.cat([sum_B_N_T.transpose(1, 2).flatten(0, 1) for sum_B_N_T in sums])
    out_T_N_D = out_T_N_D.float()
    for keys, queries, mask in _tiles(layout, heads, q_T_N_D.dtype):
        more, sum_1_N_T = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_tile(q_T_N_D, k_T_K_D, v_T_K_D, queries, keys), 0.0, False, attn_mask=mask, scale=heads.scale
        )
        _join(out_T_N_D[queries], lse_T_N[queries], more[0].transpose(0, 1), sum_1_N_T[0].T)
    return out_T_N_D.to(q_T_N_D.dtype), [lse_T_N]


def _join(out_T_N_D: Tensor, lse_T_N: Tensor, more_T_N_D: Tensor, more_lse_T_N: Tensor) -> None:
    """Adds attention to further tokens, with its log-sum-exp, to an output and its log-sum-exp, in place."""
    both_T_N = torch.logaddexp(lse_T_N, more_lse_T_N)
    out_T_N_D.mul_((lse_T_N - both_T_N).exp_()[..., None])
    out_T_N_D.addcmul_(more_T_N_D, (more_lse_T_N - both_T_N).exp_()[..., None])
    lse_T_N.copy_(both_T_N)


def _tiles(layout: Packed, heads: Heads, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """For each shared segment: its rows, as keys; the rows that continue it, as queries; and a mask to be added to the
    scores, or None if the queries see all keys."""
    for keys, queries, depth in layout.shared():
        if heads.window is None:
            yield keys, queries, None
            continue
        positions = layout.positions(queries)
        length = keys.stop - keys.start
        seen = positions[:, None] - torch.arange(depth, depth + length) < heads.window
        yield keys, queries, torch.zeros(len(positions), length, dtype=dtype).masked_fill_(~seen, _HIDDEN)


def _tile(
    q_T_N_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor, queries: slice, keys: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of queries, keys and values as batches of one sequence, [1, N, T, D] and twice [1, K, L, D]."""
    q, k, v = (x[rows].transpose(0, 1)[None] for x, rows in ((q_T_N_D, queries), (k_T_K_D, keys), (v_T_K_D, keys)))
    return q, k, v


def attend_backward(
    grad_T_N_D: Tensor,
    q_T_N_D: Tensor,
    k_T_K_D: Tensor,
    v_T_K_D: Tensor,
    out_T_N_D: Tensor,
    sums: Sequence[Tensor],
    layout: Packed,
    heads: Heads,
) -> Tensor:
    """The gradients of q, k and v side by side: [T, N + 2 K, D]. `sums`: the log-sum-exps from `attend`.

    The gradients are computed in float32. In bfloat16 torch's function took 2.3 times as long on a CPU with AMX.
    """
    if q_T_N_D.dtype != torch.float32:
        grad, q, k, v, out = (x.float() for x in (grad_T_N_D, q_T_N_D, k_T_K_D, v_T_K_D, out_T_N_D))
        return attend_backward(grad, q, k, v, out, sums, layout, heads).to(q_T_N_D.dtype)
    parts = []
    lse_T_N = sums[0]
    if layout.below:
        sums = [_block(lse_T_N, rows, shape) for rows, shape in layout.blocks()]
    for (rows, shape), sum_B_N_T in zip(layout.blocks(), sums, strict=True):
        grad, q, k, v, out = (_block(x, rows, shape) for x in (grad_T_N_D, q_T_N_D, k_T_K_D, v_T_K_D, out_T_N_D))
        mask = _window_mask(q, heads)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, sum_B_N_T, 0.0, mask is None, attn_mask=mask, scale=heads.scale
        )
        parts.append((rows, [one.transpose(1, 2).flatten(0, 1) for one in grads]))
    if len(parts) == 1 and not layout.below:
        return torch.cat(parts[0][1], 1)
    num_queries, num_keys = q_T_N_D.shape[1], k_T_K_D.shape[1]
    together = q_T_N_D.new_empty(q_T_N_D.shape[0], num_queries + 2 * num_keys, q_T_N_D.shape[2])
    for rows, grads in parts:
        torch.cat(grads, 1, out=together[rows])
    for keys, queries, mask in _tiles(layout, heads, q_T_N_D.dtype) if layout.below else ():
        grad, out = (x[queries].transpose(0, 1)[None] for x in (grad_T_N_D, out_T_N_D))
        grad_q, *grad_kv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *_tile(q_T_N_D, k_T_K_D, v_T_K_D, queries, keys), out, lse_T_N[queries].T[None],
            0.0, False, attn_mask=mask, scale=heads.scale,
        )  # fmt: skip
        together[queries, :num_queries] += grad_q[0].transpose(0, 1)
        together[keys, num_queries:] += torch.cat([one[0].transpose(0, 1) for one in grad_kv], 1)
    return together


def _block(x_T_N_D: Tensor, rows: slice, shape: tuple[int, int]) -> Tensor:
    """Rows of B sequences of one length, as [B, N, T, D]. `shape`: number and length of the sequences."""
    here = x_T_N_D if rows.stop - rows.start == x_T_N_D.shape[0] else x_T_N_D[rows]
    return here.unflatten(0, shape).transpose(1, 2)


def _window_mask(q_B_N_T_D: Tensor, heads: Heads) -> Tensor | None:
    """Mask to be added to the scores, [T, T]; None if no window hides a token."""
    num_tokens = q_B_N_T_D.shape[2]
    if heads.window is None or heads.window >= num_tokens:
        return None
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril_().triu_(1 - heads.window).logical_not_()
    mask = torch.zeros(num_tokens, num_tokens, dtype=q_B_N_T_D.dtype)
    return mask.masked_fill_(hidden, float("-inf"))


def causal(
    q_B_N_T_D: Tensor, k_B_K_L_D: Tensor, v_B_K_L_D: Tensor, heads: Heads, numbers_L: Tensor | None = None
) -> Tensor:
    """Attention of the last T of L positions: [B, N, T, D]. A position sees all positions up to its own. With
    `numbers_L`, a position whose number is not negative also sees later positions with its number."""
    num_queries, num_keys = q_B_N_T_D.shape[2], k_B_K_L_D.shape[2]
    window = heads.window if heads.window is not None and heads.window < num_keys else None
    plain = heads.softcap is None and heads.sinks_N is None
    if plain and window is None and num_queries == num_keys and numbers_L is None:
        return _sdpa(q_B_N_T_D, k_B_K_L_D, v_B_K_L_D, heads.scale, mask=None, is_causal=True)
    keys = torch.arange(num_keys, device=q_B_N_T_D.device)
    queries = keys[num_keys - num_queries :, None]
    mask = keys <= queries
    if numbers_L is not None:
        own = numbers_L[num_keys - num_queries :, None]
        mask |= (own == numbers_L) & (own >= 0)
    if window is not None:
        mask &= keys > queries - window
    return masked(q_B_N_T_D, k_B_K_L_D, v_B_K_L_D, heads, mask)


def masked(q_B_N_T_D: Tensor, k_B_K_L_D: Tensor, v_B_K_L_D: Tensor, heads: Heads, mask: Tensor | None) -> Tensor:
    """Attention to the keys for which the boolean mask is true: [B, N, T, D]. The mask is broadcastable to
    [B, N, T, L].

    Without softcap and sinks, the mask may also be None, which hides nothing, or numbers that are added to the scores.
    """
    if heads.softcap is None and heads.sinks_N is None:
        return _sdpa(q_B_N_T_D, k_B_K_L_D, v_B_K_L_D, heads.scale, mask=mask, is_causal=False)
    assert mask is not None
    groups = q_B_N_T_D.shape[1] // k_B_K_L_D.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k_B_K_L_D, v_B_K_L_D))
    scores = (q_B_N_T_D @ k.transpose(-1, -2)) * heads.scale
    if heads.softcap is not None:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if heads.sinks_N is not None:
        sinks = heads.sinks_N.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None, is_causal: bool) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function, with the signature that transformers prescribes: from query [1, N, T, D], key and value
    [1, K, T, D] to output [1, T, N, D]."""
    if layout is None:
        raise WithoutLayout("its decoder layers do not hand keyword arguments on to attention")
    heads = Heads(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_N=s_aux,
    )
    # squeeze in place of x[0], whose gradient would be a copy
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    latent: Latent | None = getattr(module, "latent", None)  # type: ignore[assignment]  # latent.py has put it there
    if latent is not None and latent.in_use:
        heads = replace(heads, values_in_keys=True)
        out = layout.attend(module.layer_idx, latent.queries(q), k, v, heads)  # type: ignore[arg-type]
        return latent.values(out)[None], None
    return layout.attend(module.layer_idx, q, k, v, heads)[None], None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _forward)
